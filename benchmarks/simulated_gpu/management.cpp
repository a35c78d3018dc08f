// The management library's functions, as nvidia-ml-py calls them (its nvmlReturn_t: 0 success, 3 not supported).
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "gpu.h"

using namespace gpu;

extern "C" {
static const int most = 16;
static char cards[most];  // the machine's, whatever CUDA_VISIBLE_DEVICES says
static const int first_uuid = 0x60, first_slot = 5;  // as CUDA tells them
static int cards_here() { return std::min(double(most), setting("SIMULATED_GPU_COUNT", 1)); }
static int found(int card, void** device) {
  if (card < 0 || card >= cards_here()) return 6;  // not found
  *device = &cards[card];
  return 0;
}
static uint64_t own_memory(void* device) {  // once this process holds any
  for (int i = 0; i < devices(); ++i)
    if (&cards[card(i)] == device && has_memory(i)) return memory_used(i) - held_by_others;
  return 0;
}
struct Memory {
  unsigned long long total, free, used;
};
struct Utilization {
  unsigned gpu, memory;
};
struct Process {  // its first version
  unsigned pid;
  unsigned long long memory;
};
struct ProcessOfInstance : Process {
  unsigned gpu_instance, compute_instance;
};
struct Sample {
  unsigned pid;
  unsigned long long at_us;
  unsigned sm, memory, encoder, decoder;
};
enum { not_supported = 3, not_found = 6, insufficient_size = 7 };

// This process, once it holds memory on the GPU, and another one where the environment says so.
static unsigned running(void* device, Process (&at)[2]) {
  unsigned count = 0;
  if (uint64_t own = own_memory(device)) at[count++] = {(unsigned)getpid(), own};
  if (held_by_others) at[count++] = {1, held_by_others};
  return count;
}

extern "C++" template <class Told>
int tell_running(void* device, unsigned* count, Told* told) {
  Process all[2];
  unsigned room = *count;
  *count = running(device, all);
  if (room < *count) return insufficient_size;
  for (unsigned i = 0; i < *count; i++) static_cast<Process&>(told[i]) = all[i];
  return 0;
}
#pragma GCC visibility push(default)
int nvmlInit() { return 0; }  // its first version, by which torch counts devices
int nvmlInit_v2() { return 0; }
int nvmlInitWithFlags(unsigned) { return 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "an error of the simulated GPU"; }
int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  snprintf(text, length, "580.00.00 (simulated)");
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = cards_here();
  return 0;
}
// The last byte of a card's UUID, and the device of its PCI address, tell it from the others.
int nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
  snprintf(text, length, "GPU-51525354-5556-5758-595a-5b5c5d5e5f%02x", first_uuid + int((char*)device - cards));
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  const char* tail = strstr(uuid, "5b5c5d5e5f");
  return tail ? found(strtol(tail + 10, nullptr, 16) - first_uuid, device) : not_found;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { return found(index, device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
  const char* colon = strrchr(address, ':');
  return colon ? found(strtol(colon + 1, nullptr, 16) - first_slot, device) : not_found;
}
int nvmlDeviceGetName(void*, char* name, unsigned length) {
  snprintf(name, length, "%s", device_name());
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = capability(false), *minor = capability(true);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = capacity, memory->used = own_memory(device) + held_by_others;
  memory->free = memory->total - memory->used;
  return 0;
}
int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) {
  *mhz = type == 2 ? 2619 : setting("SIMULATED_GPU_GHZ", 1.755) * 1000;
  return 0;
}
int nvmlDeviceGetMaxClockInfo(void*, int type, unsigned* mhz) {
  *mhz = type == 2 ? 2619 : 1980;
  return 0;
}
int nvmlDeviceGetTemperature(void*, int, unsigned* celsius) {
  *celsius = setting("SIMULATED_GPU_CELSIUS", 45);
  return 0;
}
int nvmlDeviceGetPowerUsage(void*, unsigned* milliwatts) {
  *milliwatts = 350000;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void*, unsigned* milliwatts) {
  *milliwatts = 700000;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
  *millijoules = now() / 1000000 * 350;  // 350 W
  return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void*, unsigned long long* reasons) {
  *reasons = setting("SIMULATED_GPU_CLOCK_REASONS", 0);  // nvml.h, nvmlClocksEventReasons
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
  *reasons = setting("SIMULATED_GPU_CLOCK_REASONS", 0);  // nvml.h, nvmlClocksEventReasons
  return 0;
}
int nvmlDeviceGetUtilizationRates(void*, Utilization* rates) {
  rates->gpu = 97, rates->memory = 50;
  return 0;
}
int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return not_supported; }
int nvmlDeviceGetPersistenceMode(void*, int* state) {
  *state = 1;
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return not_supported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return not_supported; }
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, Process* told) { return tell_running(device, count, told); }
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, ProcessOfInstance* told) { return tell_running(device, count, told); }
int nvmlDeviceGetProcessUtilization(void* device, Sample* told, unsigned* count, unsigned long long since_us) {
  Process all[2];
  unsigned room = *count;
  if (!(*count = running(device, all))) return not_found;
  if (room < *count || !told) return insufficient_size;
  timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  for (unsigned i = 0; i < *count; i++) told[i] = {all[i].pid, at.tv_sec * 1000000ull + at.tv_nsec / 1000, 48, 25, 0, 0};
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDART_VERSION;
  return 0;
}
#pragma GCC visibility pop
}  // extern "C"
