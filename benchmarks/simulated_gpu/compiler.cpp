// NVRTC: a program is its name expressions, compiled at once.
#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include <list>
#include <string>

struct _nvrtcProgram {
  std::list<std::string> names;
};
extern "C" {
#pragma GCC visibility push(default)
nvrtcResult nvrtcVersion(int* major, int* minor) {
  *major = CUDART_VERSION / 1000, *minor = CUDART_VERSION % 1000 / 10;
  return NVRTC_SUCCESS;
}
const char* nvrtcGetErrorString(nvrtcResult) { return "an error of the simulated GPU"; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = new _nvrtcProgram;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char* name) {
  program->names.push_back(name);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char* name, const char** lowered) {
  for (const std::string& given : program->names)
    if (given == name) *lowered = given.c_str();
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t* bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* log) { return *log = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t* bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTX(nvrtcProgram, char* text) { return *text = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t* bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char* text) { return *text = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return *count = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetSupportedArchs(int* archs) { return *archs = 90, NVRTC_SUCCESS; }
#pragma GCC visibility pop
}
