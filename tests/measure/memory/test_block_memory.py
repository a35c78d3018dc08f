"""What one block of several saves, and its gradients, from allocations made by hand."""

from lm_profiler.measure.memory.block_memory import LARGEST, block_memory
from lm_profiler.record.memory_timeline import Allocation


def saved(module: str | None, size: int, name: str = "aten.mm.default") -> Allocation:
    return Allocation(bytes=size, cause="activations", module=module, name=name)


def gradient(name: str, size: int) -> Allocation:
    return Allocation(bytes=size, cause="gradients", name=f"gradient of {name}")


def test_a_block_in_the_middle_stands_for_all() -> None:
    """Each of four blocks saves two tensors in its attention and one itself; those of the first one are larger."""
    tensors = [saved("embedding", 5000), saved(None, 7000)]
    for index in range(4):
        size = 1000 if index == 0 else 10
        tensors += [saved(f"model.blocks.{index}.attention", size), saved(f"model.blocks.{index}.attention", size)]
        tensors.append(saved(f"model.blocks.{index}", 5, "aten.add.Tensor"))
    gradients = [gradient(f"model.blocks.{index}.w", 3) for index in range(4)]
    gradients += [gradient("model.blocks.2.w", 3), gradient("model.blocks.2.b", 1), gradient("head.weight", 99)]
    block = block_memory(tensors, gradients)
    assert (block.module, block.count) == ("model.blocks.*", 4)
    assert block.saved_bytes == 2 * 10 + 5
    assert [(row.bytes, row.count) for row in block.saved] == [(10, 2), (5, 1)]
    assert block.gradients_bytes == 3 + 1


def test_of_two_lists_of_blocks_the_larger_one_counts() -> None:
    tensors = [saved(f"small.{index}", 1) for index in range(9)]
    for index in range(2):
        tensors += [saved(f"h.{index}.mlp.{part}", 10 + part) for part in range(8)]
    block = block_memory(tensors, [])
    assert (block.module, block.count) == ("h.*", 2)
    assert [row.bytes for row in block.saved] == [17, 16, 15, 14, 13][:LARGEST]


def test_a_module_without_several_blocks_has_none() -> None:
    assert block_memory([saved("first", 5), saved(None, 3), saved("h.0.mlp", 4)], []) is None
    assert block_memory([], []) is None
