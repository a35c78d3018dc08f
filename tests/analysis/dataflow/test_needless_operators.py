"""Steps of small models with one thing that they need not compute: it is found, with its line, and nothing else is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
import torch
from made_calls import made_call
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from lm_profiler.analysis.dataflow.causal_masks import calls_with_causal_masks
from lm_profiler.analysis.dataflow.copies import layers_on_copied_rows
from lm_profiler.analysis.dataflow.loops import calls_in_loops, overhead_of_calling_s
from lm_profiler.analysis.dataflow.needless_operators import backward_share_of_forward, needless_operators
from lm_profiler.analysis.dataflow.repeats import repeated_calls
from lm_profiler.analysis.dataflow.uncompiled import uncompiled_shares
from lm_profiler.measure.counts import step_operators
from lm_profiler.measure.counts.causal_masks import causal_length
from lm_profiler.measure.counts.flops import FlopCounter
from lm_profiler.measure.counts.step_operators import StepOperators
from lm_profiler.record.findings import NeedlessOperators
from lm_profiler.record.operator_calls import Operand, Product, StepCalls

TOKENS, WIDTH, CLASSES = 80, 64, 512


class Net(nn.Module):
    """An embedding, a block with dropout, and a head; ``critic`` has an optimizer of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.critic = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1))
        self.table = nn.Embedding(4096, 16)
        self.lstm_cell = nn.LSTMCell(WIDTH, WIDTH)
        self.gru_cell = nn.GRUCell(WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.mask: Tensor | None = None  # of attention; no buffer
        self.register_buffer("positions", torch.arange(256.0))
        self.register_buffer("noise_scales", torch.ones(TOKENS, WIDTH))


class Step:
    """One training step, that a plant changes: ``run`` computes the loss of hidden states, labels and logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.net = Net(dropout)
        self.generator = torch.optim.AdamW([*self.net.embedding.parameters(), *self.net.block.parameters(),
                                            *self.net.head.parameters(), *self.net.table.parameters()])  # fmt: skip
        self.critic = torch.optim.AdamW(self.net.critic.parameters())
        # by this clock each call takes as long as any other
        clock = count(step=1000).__next__
        self.operators = StepOperators(lambda: (self.net, [self.generator, self.critic]), clock=clock)
        self.history: list[float] = []
        self.keeps_gradients = False
        self.mask: Tensor | None = None  # of attention, made by the loader
        self.convolutions: nn.ModuleList | None = None
        self.frozen = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(20)])

    def needless(self, loss_of: Callable[[Step, Tensor, Tensor], Tensor]) -> list[NeedlessOperators]:
        """Run two steps, and return what the second one may have computed needlessly."""
        return needless_operators(self.calls(loss_of), least_share=0.01)

    def calls(self, loss_of: Callable[[Step, Tensor, Tensor], Tensor]) -> StepCalls:
        """Run two steps, and return the calls of the second one."""
        self.operators.start()
        try:
            for _ in range(2):
                self.operators.begin_step()
                with FlopCounter(operators=self.operators):
                    self._train(loss_of)
                self.operators.end_part()
        finally:
            self.operators.stop()
        return self.operators.take(is_complete=True)

    def _train(self, loss_of: Callable[[Step, Tensor, Tensor], Tensor]) -> None:
        self.operators.phase = "forward"
        labels = torch.randint(CLASSES, (TOKENS,))
        hidden = self.net.block(self.net.embedding(labels))
        loss = loss_of(self, hidden, labels)
        self.backward(loss)
        self.update(self.generator)

    def backward(self, loss: Tensor) -> None:
        self.operators.phase = "backward"
        loss.backward()
        self.operators.phase = "forward"

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        self.operators.phase = "optimizer"
        optimizer.step()
        if not self.keeps_gradients:
            optimizer.zero_grad()
        self.operators.phase = "forward"


def plain(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(step.net.head(hidden), labels)


def unused_result(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    step.net.head(hidden.detach()).softmax(-1)  # here
    return plain(step, hidden, labels)


def unused_gradients(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    score = step.net.critic(hidden).mean()  # here
    step.backward(score + plain(step, hidden, labels))
    step.update(step.generator)
    step.critic.zero_grad()
    judged = step.net.critic(torch.rand(TOKENS, WIDTH)).mean()
    step.backward(judged)
    step.update(step.critic)
    hidden = step.net.block(step.net.embedding(labels))
    return plain(step, hidden, labels)


def gradient_of_an_input(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The program keeps the input, and so its gradient."""
    step.input = hidden.detach().requires_grad_()
    step.frozen.requires_grad_(False)
    hidden = step.frozen(step.input)  # here
    return plain(step, hidden, labels)


def second_pass(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden)
    again = step.net.head(hidden)  # here
    return functional.cross_entropy((logits + again) / 2, labels)


def normalized_graph(labels: Tensor) -> Tensor:
    """Return a sparse matrix that averages the classes which occur together."""
    edges = torch.stack([labels.repeat_interleave(16), labels.repeat(16)])
    ones = torch.ones(edges.shape[1])
    graph = torch.sparse_coo_tensor(edges, ones, (CLASSES, CLASSES), check_invariants=False).coalesce()
    degrees = torch.sparse.sum(graph, dim=1).to_dense()
    weights = graph.values() / degrees[graph.indices()[0]]
    return torch.sparse_coo_tensor(graph.indices(), weights, graph.shape, check_invariants=False, is_coalesced=True)


def graph_of_each_layer(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    table = torch.sparse.mm(normalized_graph(labels), step.net.embedding.weight)
    table = torch.sparse.mm(normalized_graph(labels), table.relu())
    return plain(step, hidden + table[labels], labels)


def graph_of_all_layers(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    graph = normalized_graph(labels)
    table = torch.sparse.mm(graph, step.net.embedding.weight)
    table = torch.sparse.mm(graph, table.relu())
    return plain(step, hidden + table[labels], labels)


def table_of_each_step(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    positions = step.net.positions
    table = torch.outer(positions, positions).sin().exp()  # here
    return plain(step, hidden + table[:1, :WIDTH], labels)


def table_filled_in_place(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    table = torch.zeros(256, WIDTH)
    for _ in range(8):
        table.add_(step.net.positions[:, None]).cos_()  # here
    return plain(step, hidden + table[:1], labels)


def masks_of_lengths(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The lengths are numbers of Python, which differ from step to step."""
    mask = torch.zeros(64, 256)
    for row in range(64):
        mask[row, : 100 + row] = 1.0
    return plain(step, hidden * mask.mean(), labels)


def buffer_that_decays(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """It depends on no data, but differs from step to step."""
    for _ in range(8):
        step.net.noise_scales.mul_(0.99)
    return plain(step, hidden * step.net.noise_scales, labels)


def diagonal_matrix(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    scales = 1.0 + hidden.detach().flatten()[:256]
    scaled = torch.diag(scales) @ torch.rand(256, 256)  # here
    return plain(step, hidden + scaled[:1, :WIDTH], labels)


def one_hot_matrix(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    embedded = functional.one_hot(labels, CLASSES).float() @ step.net.embedding.weight  # here
    return plain(step, hidden + embedded, labels)


def ignored_labels(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    some = labels.masked_fill(torch.arange(TOKENS) < TOKENS * 3 // 4, -100)
    mixed = hidden + hidden.mean(0)  # so that all positions are needed up to here
    logits = step.net.head(mixed)  # here
    return functional.cross_entropy(logits, some)


def masked_loss(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mixed = hidden + hidden.mean(0)
    losses = functional.cross_entropy(step.net.head(mixed), labels, reduction="none")  # here
    mask = (torch.arange(TOKENS) >= TOKENS * 3 // 4).float()
    return (losses * mask).sum()


def chosen_positions(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mixed = hidden + hidden.mean(0)
    outputs = functional.relu(step.net.head(mixed))  # here
    return outputs[: TOKENS // 4].square().mean()


def one_token_of_the_output(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """All blocks run the same lines; in the last one, all tokens but the first are not used."""
    for layer in (step.net.block[0], step.net.block[3]):
        hidden = hidden + layer(attended(hidden))  # here
    return plain(step, hidden[:1], labels[:1])


def two_heads_of_one_class(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Both heads run the same line, but neither depends on the other; the second has few labels."""
    outputs = []
    for head in (step.net.block[0], step.net.block[3]):
        outputs.append(head(hidden))
    first, second = outputs
    return plain(step, first, labels) + plain(step, second[:1], labels[:1])


def attended(hidden: Tensor) -> Tensor:
    tokens = hidden[None, None]
    return functional.scaled_dot_product_attention(tokens, tokens, tokens)[0, 0]


def table_of_pairs(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first = hidden.unsqueeze(0).expand(TOKENS, TOKENS, WIDTH)
    second = hidden.unsqueeze(1).expand(TOKENS, TOKENS, WIDTH)
    distances = ((first - second) ** 2).sum(dim=2)  # here
    return plain(step, hidden, labels) + distances.mean()


def growing_tensor(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    joined = hidden[:1]
    for row in range(1, TOKENS):
        joined = torch.cat([joined, hidden[row : row + 1]])  # here
    return plain(step, joined, labels)


def slices_of_a_loop(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    state = torch.zeros(WIDTH)
    states = []
    for row in range(TOKENS):
        state = 0.5 * state + hidden[row]  # here
        states.append(state)
    return plain(step, torch.stack(states), labels)


def distances_by_indexing(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    distances = (hidden[:, None] - hidden[None]).abs().sum(dim=2)  # here
    return plain(step, hidden, labels) + distances.mean()


def column_and_vector(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The shapes do not match: the result is a table of 320 × 320 pairs."""
    values = hidden[:, :4].reshape(-1)
    errors = values[:, None] - torch.rand(320)  # here
    return plain(step, hidden, labels) + (errors.exp() @ torch.rand(320)).mean()


def costly_order(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    query, key = torch.rand(512, 8), torch.rand(512, 8)
    value = torch.rand(512, 8) * hidden.mean()
    attended = (query @ key.T) @ value  # here
    return plain(step, hidden, labels) + attended.mean()


def large_table(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    found = step.net.table(labels)  # here
    return plain(step, hidden, labels) + found.mean()


def embedding_with_max_norm(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    step.net.table.max_norm = 0.1
    rows = [step.net.table(labels + shift) for shift in range(8)]  # here
    return plain(step, hidden, labels) + torch.cat(rows).square().mean()


def float64(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    weights = torch.from_numpy(np.ones((TOKENS, CLASSES)))
    logits = step.net.head(hidden) * weights  # here
    return functional.cross_entropy(logits, labels).float()


def metric(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean().item()  # here
    step.history.append(entropy)
    return functional.cross_entropy(logits, labels)


def histogram_in_a_hook(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    weight = step.net.block[0].weight

    def note(gradient: Tensor) -> None:
        step.history += torch.histc(weight.sort().values).tolist()  # here

    hidden.register_hook(note)
    return plain(step, hidden, labels)


def metric_of_numpy(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden)
    ranks = logits.detach().sort(-1).indices.numpy()  # here
    step.history.append(float(ranks[0, 0]))
    return functional.cross_entropy(logits, labels)


def plain_attended(step: Step, hidden: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Attention of as many positions as ``mask`` has, four times, by two samples with two heads."""
    states = hidden.new_ones(2, 2, mask.shape[-1], 8) * hidden.mean()
    for _ in range(4):
        states = functional.scaled_dot_product_attention(states, states, states, mask)
    return plain(step, hidden + states.mean(), labels)


def mask_made_in_place(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mask = torch.zeros(600, 600)
    mask.fill_(-1e9).triu_(1)
    return plain_attended(step, hidden, labels, mask)


def boolean_mask_of_a_layer(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """As in ``nn.MultiheadAttention``, in which True hides a position."""
    layer = nn.MultiheadAttention(WIDTH, 2)
    states = hidden.repeat(8, 1)
    hides = torch.arange(len(states))[:, None] < torch.arange(len(states))
    for _ in range(4):
        states, _ = layer(states, states, states, attn_mask=hides, need_weights=False)  # here
    return plain(step, hidden + states[:TOKENS], labels)


def mask_that_is_kept(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    if step.net.mask is None:
        step.net.mask = torch.ones(1000, 1000, dtype=torch.bool).tril()
    states = torch.ones(1, 1, 1000, 8) * hidden.mean()
    for _ in range(4):
        states = functional.scaled_dot_product_attention(states, states, states, step.net.mask)  # here
    return plain(step, hidden + states.mean(), labels)


def short_causal_mask(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """On the CPU all keys are one block, of which nothing can be skipped."""
    step.mask = torch.full((512, 512), -torch.inf).triu(1)
    return plain_attended(step, hidden, labels, step.mask)


def mask_of_a_window(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mask = torch.ones(600, 600, dtype=torch.bool).tril().triu(-100)
    mask[-1, 0] = True  # in the corner it looks like a causal mask
    return plain_attended(step, hidden, labels, mask)


def mask_with_distances(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    positions = torch.arange(600.0)
    distances = (positions[None] - positions[:, None]).clamp(max=0.0)
    mask = torch.full((600, 600), -torch.inf).triu(1) + 0.1 * distances
    mask[-1, 0] = 0.0
    return plain_attended(step, hidden, labels, mask)


def mask_of_documents(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """It depends on the batch; in this one, all positions are of one document."""
    documents = (labels[:1] >= 0).expand(600).cumsum(0) // 1000
    is_same = documents[:, None] == documents[None]
    return plain_attended(step, hidden, labels, is_same.tril())


def mask_of_each_sample(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loader made it, with padding; these samples have none."""
    if step.mask is None:
        step.mask = torch.ones(600, 600, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    return plain_attended(step, hidden, labels, step.mask)


def mask_of_one_sample(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loader made it, with borders of documents; this sample has none."""
    if step.mask is None:
        step.mask = torch.zeros(600, 600).masked_fill(torch.ones(600, 600).triu(1) > 0, -torch.inf)
    return plain_attended(step, hidden, labels, step.mask)


def attention_by_hand(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    scores = hidden @ hidden.T
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    weights = (scores / 8.0).masked_fill(~mask, -torch.inf).softmax(-1)  # here
    return plain(step, weights @ hidden, labels)


def convolutions_of(step: Step, *kernels: tuple[int, ...], dilation: int = 1) -> list[nn.Module]:
    """Convolutions with 8 channels whose results have the shape of their input; the same in each step."""
    if step.convolutions is None:
        convolution = {1: nn.Conv1d, 2: nn.Conv2d}[len(kernels[0])]
        paddings = [tuple(dilation * (length // 2) for length in kernel) for kernel in kernels]
        step.convolutions = nn.ModuleList(
            convolution(8, 8, kernel, padding=padding, dilation=dilation)
            for kernel, padding in zip(kernels, paddings, strict=True)
        )
        step.generator.add_param_group({"params": [*step.convolutions.parameters()]})
    return list(step.convolutions)


def branches_added_to_their_input(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    states = hidden.view(1, 8, -1)
    for _ in range(4):
        inputs = states.relu()
        for layer in convolutions_of(step, (1,), (3,), (5,)):
            states = states + layer(inputs)  # here
    return plain(step, states.view(TOKENS, WIDTH), labels)


def heads_that_are_averaged(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first, _, _, last = step.net.block
    for _ in range(4):
        inputs = hidden.relu()
        hidden = torch.stack([layer(inputs) for layer in (first, last)]).mean(0)  # here
    return plain(step, hidden, labels)


def crossed_kernels(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """One kernel of 5 × 5 is larger than a row and a column of 5."""
    states = hidden.view(1, 8, 16, -1)
    row, column = convolutions_of(step, (1, 5), (5, 1))
    states = row(states) + column(states)
    return plain(step, states.view(TOKENS, WIDTH), labels)


def transposed_result(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """No single layer gives the sum of a result and of another one that is transposed."""
    first, _, _, last = step.net.block
    for _ in range(4):
        inputs = hidden[:WIDTH].relu()
        hidden = first(inputs) + last(inputs).t()
    return plain(step, hidden, labels[:WIDTH])


def dilated_branches(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    states = hidden.view(1, 8, -1)
    near, far = convolutions_of(step, (3,), (5,), dilation=4)
    states = near(states) + far(states)
    return plain(step, states.view(TOKENS, WIDTH), labels)


def normalized_branches(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """As in RepVGG: in training, each branch is normalized by its own statistics."""
    states = hidden.view(1, 8, -1)
    branches = [functional.batch_norm(layer(states), None, None, training=True)
                for layer in convolutions_of(step, (1,), (3,))]  # fmt: skip
    states = branches[0] + branches[1]
    return plain(step, states.view(TOKENS, WIDTH), labels)


def gated_branches(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first, _, _, last = step.net.block
    return plain(step, first(hidden) * last(hidden).sigmoid(), labels)


def heads_with_own_losses(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first, _, _, last = step.net.block
    outputs = [first(hidden), last(hidden)]
    losses = [plain(step, output, labels) for output in outputs]
    return losses[0] + losses[1] + plain(step, outputs[0] + outputs[1], labels)


def layers_of_halves(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Their inputs have one storage."""
    states = hidden.view(2, 8, -1)
    near, far = convolutions_of(step, (3,), (5,))
    states = near(states[:1]) + far(states[1:])
    return plain(step, states.view(TOKENS // 2, WIDTH), labels[: TOKENS // 2])


def scores_of_all_pairs(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Additive attention: the results are added for each pair of positions."""
    first, _, _, last = step.net.block
    pairs = first(hidden)[:, None] + last(hidden)[None]
    return plain(step, pairs.tanh().amax(1), labels)


def loop_over_samples(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    rows = [step.net.head(row[None]) for row in hidden]  # here
    return functional.cross_entropy(torch.cat(rows), labels)


def head_in_a_decoder(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The state depends on the one before; the head could be applied to all states after the loop."""
    state = torch.zeros(8, WIDTH)
    logits = []
    for token in hidden.view(10, 8, WIDTH):
        state = step.net.block(token + state)
        logits.append(step.net.head(state))  # here
    return functional.cross_entropy(torch.cat(logits), labels)


def head_behind_a_layer_used_as_a_cell(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The operators of the layer cannot be moved out of the loop, though some of them do not depend on the state."""
    state = torch.zeros(1, 4, WIDTH)
    logits = []
    for token in hidden.view(20, 1, 4, WIDTH):
        output, state = step.net.gru(token, state)
        logits.append(step.net.head(output[0]))  # here
    return functional.cross_entropy(torch.cat(logits), labels)


def head_whose_output_is_fed_back(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    state = hidden[:8]
    logits = []
    for _ in range(10):
        logits.append(step.net.head(state))
        state = state + step.net.embedding(logits[-1].argmax(-1))
    return functional.cross_entropy(torch.cat(logits), labels)


def cell_on_each_token(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    tokens = hidden.view(20, -1, WIDTH)
    output, memory = torch.zeros_like(tokens[0]), torch.zeros_like(tokens[0])
    outputs = []
    for token in tokens:
        output, memory = step.net.lstm_cell(token, (output, memory))  # here
        outputs.append(output)
    return plain(step, torch.cat(outputs), labels)


def gru_on_each_token(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    state = torch.zeros(1, 4, WIDTH)
    outputs = []
    for token in hidden.view(20, 1, 4, WIDTH):
        output, state = step.net.gru(token, state)  # here
        outputs.append(output[0])
    return plain(step, torch.cat(outputs), labels)


def packed_sequences_of_one_length(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    packed = pack_padded_sequence(hidden.view(20, 4, WIDTH), torch.full((4,), 20))
    outputs, _ = step.net.gru(packed)  # here
    return plain(step, outputs.data, labels)


def packed_sequences_of_different_lengths(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    packed = pack_padded_sequence(hidden.view(20, 4, WIDTH), torch.tensor([20, 19, 16, 9]))
    outputs, _ = step.net.gru(packed)  # here
    return plain(step, outputs.data, labels[: 20 + 19 + 16 + 9])


def padded_sequences(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The layer has a loop of its own."""
    outputs, _ = step.net.gru(hidden.view(20, 4, WIDTH))
    return plain(step, outputs.flatten(0, 1), labels)


def forces_of_molecules(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss contains a gradient, which is differentiated in turn."""
    places = torch.rand(TOKENS, WIDTH, requires_grad=True)
    energy = step.net.critic(places).sum()
    (forces,) = torch.autograd.grad(energy, places, create_graph=True)
    return plain(step, hidden, labels) + forces.square().mean()


def lstm_on_each_token(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """On the CPU the whole layer is one operator, whose products are not seen."""
    states = None
    outputs = []
    for token in hidden.view(20, 1, 4, WIDTH):
        output, states = step.net.lstm(token, states)  # here
        outputs.append(output[0])
    return plain(step, torch.cat(outputs), labels)


def layer_on_edges(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    sources = torch.randint(TOKENS, (6 * TOKENS,))
    targets = torch.randint(TOKENS, (6 * TOKENS,))
    messages = step.net.head(hidden[sources])  # here
    received = torch.zeros(TOKENS, CLASSES).index_add(0, targets, messages)
    return functional.cross_entropy(received, labels)


def indexed_rows(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    rows = torch.randperm(TOKENS)
    for _ in range(4):
        hidden = hidden[rows]  # here
    return plain(step, hidden, labels)


def transposed_logits(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden).view(8, 10, CLASSES)
    return functional.cross_entropy(logits.transpose(1, 2), labels.view(8, 10))  # here


def logits_of_a_convolution(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """In memory, the classes come before the positions, too."""
    logits = step.net.head(hidden).view(8, CLASSES, 10)
    return functional.cross_entropy(logits, labels.view(8, 10))


def small_parameters_of(step: Step) -> list[nn.Parameter]:
    """The same in each step."""
    if len(step.generator.param_groups) == 1:
        new_parameters = [nn.Parameter(torch.zeros(WIDTH)) for _ in range(CLASSES)]
        step.generator.add_param_group({"params": new_parameters})
    return list(step.generator.param_groups[1]["params"])


def stacked_parameters(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    table = torch.stack(small_parameters_of(step))  # here
    return plain(step, hidden + functional.embedding(labels, table), labels)


def norm_of_small_parameters(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    return plain(step, hidden, labels) + torch.cat(small_parameters_of(step)).norm()


def permuted_copies(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    for _ in range(4):
        hidden = (2.0 * hidden).T.contiguous()  # here
    return plain(step, hidden, labels)


def costly_penalty(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    def penalty(scores: Tensor) -> Tensor:
        for _ in range(8):
            scores = scores.softmax(0).softmax(1)  # here
        return scores.mean()

    return plain(step, hidden, labels) + penalty(hidden)


def penalty_without_weight(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The weight of a loss is zero, and the loss is computed by a frozen network, too."""
    logits = step.net.head(hidden)
    penalty = (0.0 * difference_to_frozen(step, hidden)).mean()  # here
    return functional.cross_entropy(logits, labels) + penalty


def difference_to_frozen(step: Step, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        reference = step.frozen(hidden)
    difference = reference - hidden
    return torch.exp(difference) - difference - 1.0


def logged_penalty_without_weight(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The program also keeps the value of the loss."""
    reference = step.frozen(hidden.detach())
    penalty = (reference - hidden).square()
    step.last_penalty = penalty.detach().mean()
    return plain(step, hidden, labels) + (0.0 * penalty).mean()


def costly_line(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The function has layers, the line has none. It is between two of them."""
    gate = hidden.softmax(0).softmax(1).softmax(0).softmax(1).softmax(0).softmax(1).softmax(0).softmax(1)  # here
    return plain(step, hidden + gate, labels)


def norms_of_weights(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    norm = torch.zeros(())
    for weight in step.net.block.parameters():
        norm = norm + weight.exp().log().pow(2).sum()  # here
    return plain(step, hidden, labels) + norm


def adapted_weight(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first, _, _, last = step.net.block
    weight = torch.ones(WIDTH, WIDTH)  # frozen
    for _ in range(4):
        weight = weight + 2.0 * (first.weight @ last.weight)  # here
    return plain(step, hidden @ weight, labels)


@pytest.mark.parametrize(
    "plant, reason, phase",
    [
        (unused_result, "unused", "forward"),
        (unused_gradients, "unused", "backward"),
        (gradient_of_an_input, "unused", "backward"),
        (second_pass, "repeated", "backward"),
        (table_of_each_step, "constant", "forward"),
        (table_filled_in_place, "constant", "forward"),
        (diagonal_matrix, "zeros", "forward"),
        (one_hot_matrix, "zeros", "forward"),
        (ignored_labels, "ignored", "backward"),
        (masked_loss, "ignored", "backward"),
        (chosen_positions, "ignored", "backward"),
        (one_token_of_the_output, "ignored_at_last", "backward"),
        (table_of_pairs, "broadcast", "backward"),
        (distances_by_indexing, "broadcast", "backward"),
        (column_and_vector, "broadcast", "backward"),
        (growing_tensor, "growing", "forward"),
        (slices_of_a_loop, "sliced", "backward"),
        (costly_order, "order", "forward"),
        (large_table, "unused_rows", "optimizer"),
        (embedding_with_max_norm, "renormalized", "forward"),
        (float64, "some_double", "forward"),
        (metric, "figures", "forward"),
        (metric_of_numpy, "figures", "forward"),
        (histogram_in_a_hook, "figures", "backward"),
        (attention_by_hand, "scores", "backward"),
        (boolean_mask_of_a_layer, "causal", "backward"),
        (mask_that_is_kept, "causal", "backward"),
        (branches_added_to_their_input, "summed", "backward"),
        (heads_that_are_averaged, "summed", "backward"),
        (loop_over_samples, "looped", "backward"),
        (head_in_a_decoder, "looped", "backward"),
        (head_behind_a_layer_used_as_a_cell, "looped", "backward"),
        (cell_on_each_token, "cells", "backward"),
        (gru_on_each_token, "cells", "backward"),
        (lstm_on_each_token, "cells", "backward"),
        (packed_sequences_of_one_length, "packed_equal", "backward"),
        (packed_sequences_of_different_lengths, "packed", "backward"),
        (layer_on_edges, "gathered", "backward"),
        (indexed_rows, "indexed", "backward"),
        (transposed_logits, "transposed", "backward"),
        (stacked_parameters, "small_parameters", "optimizer"),
        (permuted_copies, "copied", "forward"),
        (penalty_without_weight, "cancelled", "backward"),
        (costly_penalty, "side_work", "backward"),
        (costly_line, "unfused", "backward"),
        (norms_of_weights, "side_work", "backward"),
        (adapted_weight, "side_work", "backward"),
    ],
)
def test_what_is_needless_has_its_reason_and_its_line(
    plant: Callable[[Step, Tensor, Tensor], Tensor], reason: str, phase: str
) -> None:
    found = {operators.reason: operators for operators in Step().needless(plant)}[reason]
    assert phase in found.phase_shares
    source, first_line = inspect.getsourcelines(plant)
    planted_line = first_line + next(index for index, text in enumerate(source) if "# here" in text)
    assert found.line == planted_line


def test_attention_that_is_causal_needs_no_mask() -> None:
    """Four calls of attention, their backward passes, and the three calls that make the mask."""
    calls = Step().calls(mask_made_in_place)
    shares = calls_with_causal_masks(calls)
    share_by_name = {calls.calls[number].name: share for number, share in shares.items()}
    assert len(shares) == 4 + 4 + 3
    # Of two blocks of keys, the first 512 of 600 queries skip the second one, which has 88 keys.
    skipped_share = 512 * 88 / 600**2
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert share_by_name[attention] == share_by_name[f"{attention}_backward"]
    assert share_by_name[attention] == pytest.approx(skipped_share + 0.08 * (1.0 - skipped_share))
    assert share_by_name["aten::triu_"] == 1.0


def test_a_mask_of_several_layers_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three calls of attention get one mask, and the fourth gets a copy that shows one later position."""
    searched: list[int] = []

    def counted_length(mask: Tensor) -> int:
        searched.append(len(mask))
        return causal_length(mask)

    def changed_mask(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
        mask = torch.full((600, 600), -torch.inf).triu(1)
        states = torch.ones(1, 1, 600, 8) * hidden.mean()
        for _ in range(3):
            states = functional.scaled_dot_product_attention(states, states, states, mask)
        mask = mask.clone()
        mask[0, 1] = 0.0
        states = functional.scaled_dot_product_attention(states, states, states, mask)
        return plain(step, hidden + states.mean(), labels)

    monkeypatch.setattr(step_operators, "causal_length", counted_length)
    calls = Step().calls(changed_mask).calls
    assert len(searched) == 2 * 2  # two steps
    assert sum(call.causal_mask is not None and call.phase == "forward" for call in calls) == 3


def accumulated(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    step.keeps_gradients = True
    return plain(step, hidden, labels)


def two_batches(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    step.backward(plain(step, hidden, labels))
    other_labels = torch.randint(CLASSES, (TOKENS,))
    other_hidden = step.net.block(step.net.embedding(other_labels))
    return plain(step, other_hidden, other_labels)


def checkpointed(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    hidden = checkpoint(step.net.block, hidden, use_reentrant=False)
    return plain(step, hidden, labels)


def two_draws(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    first = functional.dropout(step.net.head(hidden), 0.5)
    noise = torch.rand_like(first)
    other_noise = torch.rand_like(first)
    return functional.cross_entropy(first + noise + other_noise, labels)


def changed_copies(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden)
    low, high = logits.clone(), logits.clone()
    low[:, : CLASSES // 2] = -10.0
    high[:, CLASSES // 2 :] = -10.0
    return functional.cross_entropy(low + high, labels)


def acting(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        action = step.net.head(hidden).argmax(-1).numpy()
    observation = torch.from_numpy(np.resize(action, TOKENS).copy()) % CLASSES
    return plain(step, step.net.block(step.net.embedding(observation)), labels)


def attention(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(hidden[None], hidden[None], hidden[None])
    return plain(step, mixed[0], labels)


def sparse_activations(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A ReLU leaves few values, more of them in some rows than in others."""
    offsets = torch.linspace(0.5, 3.0, TOKENS)[:, None]
    activations = (torch.randn(TOKENS, WIDTH) + hidden - offsets).relu()
    return plain(step, activations, labels)


def slices_at_once(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    state = torch.zeros(WIDTH)
    states = []
    for row in hidden.unbind(0):
        state = 0.5 * state + row
        states.append(state)
    return plain(step, torch.stack(states), labels)


def sampler(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Moves its samples along the gradient of a network, whose backward passes are layers, too."""
    samples = torch.rand(4, 8, 16, 16)
    kernel = torch.rand(8, 8, 3, 3)
    for _ in range(8):
        samples.requires_grad_()
        energy = functional.conv2d(samples, kernel, padding=1).sum()
        (gradient,) = torch.autograd.grad(energy, samples)
        samples = samples.detach().sub(gradient, alpha=0.1)
    return plain(step, hidden + samples.mean(), labels)


def slices_of_many_tensors(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """As in attention, whose queries, keys and values are slices of one tensor in each layer."""
    for _ in range(8):
        packed = torch.stack([hidden, hidden.square(), hidden.exp()])
        query, key, value = (packed[number] for number in range(3))
        hidden = query * key + value
    return plain(step, hidden, labels)


def table_filled_row_by_row(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A dynamic program reads the row that it has written before."""
    table = hidden.clone()
    for row in range(1, TOKENS):
        table[row] = 0.5 * table[row - 1].clone() + table[row]
    return plain(step, table, labels)


def overlapping_windows(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    windows = [hidden[row : row + 8].mean(0) for row in range(TOKENS)]
    return plain(step, torch.stack(windows), labels)


def largest_of_all_pairs(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Neither distances nor products."""
    largest = (hidden[:, None] - hidden[None]).relu().amax(dim=1)
    return plain(step, largest, labels)


def mixture_of_experts(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Each row goes to two of four experts, each of which has a weight of its own."""
    routed = hidden[torch.arange(2 * TOKENS) % TOKENS]
    first, _, _, last = step.net.block
    results = []
    for expert, rows in zip((first, last, first, last), routed.split(TOKENS // 2), strict=True):
        results.append(expert(rows))
    return plain(step, torch.cat(results)[:TOKENS], labels)


def discretised_states(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A state-space model needs the decay of each of its states at each position."""
    decays = torch.exp(hidden[:, :, None] * torch.rand(1, 1, 32))
    return plain(step, hidden, labels) + (decays.view(TOKENS, -1) @ torch.rand(WIDTH * 32)).mean()


def cell_without_kernel(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """On the CPU, torch's GRU calls the same operators as its cell."""
    tokens = hidden.view(20, -1, WIDTH)
    outputs = [torch.zeros_like(tokens[0])]
    for token in tokens:
        outputs.append(step.net.gru_cell(token, outputs[-1]))
    return plain(step, torch.cat(outputs[1:]), labels)


def decoder(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The input of the cell is made from its last output."""
    tokens = hidden.view(20, -1, WIDTH)
    output, memory = torch.zeros_like(tokens[0]), torch.zeros_like(tokens[0])
    outputs = []
    for token in tokens:
        output, memory = step.net.lstm_cell(token + output, (output, memory))
        outputs.append(output)
    return plain(step, torch.cat(outputs), labels)


def hardest_examples(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The losses of all positions are needed to find the largest."""
    losses = functional.cross_entropy(step.net.head(hidden), labels, reduction="none")
    return losses[losses > losses.detach().quantile(0.75)].mean()


def labels_of_the_model(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Pseudo-labels: only positions of which the model is sure have one."""
    logits = step.net.head(hidden)
    confidence, own_labels = logits.detach().softmax(-1).max(-1)
    chosen = own_labels.masked_fill(confidence < confidence.quantile(0.75), -100)
    return functional.cross_entropy(logits, chosen)


def pooled_positions(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    outputs = step.net.head(hidden)[:, :2]
    return functional.max_pool1d(outputs.T[None], 20).mean()


def fed_with_its_output(layer_name: str) -> Callable[[Step, Tensor, Tensor], Tensor]:
    def loss_of(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
        layer = getattr(step.net, layer_name)
        output, states = hidden.view(20, 1, 4, WIDTH)[0], None
        outputs = []
        for _ in range(20):
            output, states = layer(output, states)
            outputs.append(output[0])
        return plain(step, torch.cat(outputs), labels)

    return loss_of


def bidirectional_lstm(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    layer = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True)
    states = None
    outputs = []
    for token in hidden.view(20, 1, 4, WIDTH):
        output, states = layer(token, states)
        outputs.append(output[0])
    return plain(step, torch.cat(outputs), labels)


def lstm_of_each_agent(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    layers = [nn.LSTM(WIDTH, WIDTH) for _ in range(20)]
    tokens = hidden.view(20, 1, 4, WIDTH)
    outputs = [layer(token)[0][0] for layer, token in zip(layers, tokens, strict=True)]
    return plain(step, torch.cat(outputs), labels)


def lstm_without_earlier_states(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    outputs = [step.net.lstm(token)[0][0] for token in hidden.view(20, 1, 4, WIDTH)]
    return plain(step, torch.cat(outputs), labels)


def lstm_with_masked_states(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    states = None
    outputs = []
    for token in hidden.view(20, 1, 4, WIDTH):
        output, states = step.net.lstm(token, states)
        mask = (torch.rand(1, 4, 1) > 0.1).float()
        states = tuple(state * mask for state in states)
        outputs.append(output[0])
    return plain(step, torch.cat(outputs), labels)


def sums_by_index(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """``scatter_reduce`` computes the gradient of the zeros, too, which nobody can switch off."""
    index = torch.randint(TOKENS, (TOKENS, 1)).expand(TOKENS, WIDTH)
    sums = torch.zeros(TOKENS, WIDTH).scatter_reduce(0, index, hidden, "sum", include_self=False)
    return plain(step, sums, labels)


def transparent_samples(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A radiance field: samples of density 0 have no gradient in this step, but their density may rise."""
    outputs = step.net.head(hidden)
    density = functional.relu(outputs[:, 0] - outputs[:, 0].detach().quantile(0.75))
    opacity = 1.0 - torch.exp(-density)
    return (opacity[:, None] * outputs[:, 1:4].sigmoid()).mean()


def largest_positions(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """All positions are needed to find the largest of 20."""
    outputs = step.net.head(hidden).view(4, 20, CLASSES)
    return outputs[..., :2].amax(1).mean()


def dead_positions(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    offsets = torch.where(torch.arange(TOKENS) < TOKENS * 3 // 4, 100.0, 0.0)
    return functional.relu(step.net.head(hidden) - offsets[:, None]).mean()


def satisfied_margins(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    scores = step.net.head(hidden)[:, 0]
    margins = scores.detach().quantile(0.25) - scores
    return margins.clamp(min=0.0).mean()


def decoder_with_a_layer(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The input of the layer is made from its last output."""
    tokens = hidden.view(20, 1, 4, WIDTH)
    output, states = torch.zeros_like(tokens[0]), None
    outputs = []
    for token in tokens:
        output, states = step.net.lstm(token + output, states)
        outputs.append(output[0])
    return plain(step, torch.cat(outputs), labels)


def changed_states(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Callable[[Step, Tensor, Tensor], Tensor]:
    def loss_of(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
        tokens = hidden.view(20, -1, WIDTH)
        output, memory = torch.zeros_like(tokens[0]), torch.zeros_like(tokens[0])
        outputs = []
        for token in tokens:
            output, memory = change(*step.net.lstm_cell(token, (output, memory)))
            outputs.append(output)
        return plain(step, torch.cat(outputs), labels)

    return loss_of


def penalized_memory(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The loss reads each inner state."""
    penalties: list[Tensor] = []

    def penalize(output: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        penalties.append(memory.square().mean())
        return output, memory

    return changed_states(penalize)(step, hidden, labels) + torch.stack(penalties).sum()


dropped_states = changed_states(lambda output, memory: (functional.dropout(output, 0.1), memory))
reset_memory = changed_states(lambda output, memory: (output, memory * (torch.rand(len(memory), 1) > 0.1)))
normalized_states = changed_states(lambda output, memory: (functional.layer_norm(output, (WIDTH,)), memory))


def recurrent(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Each call needs the one before it."""
    for _ in range(40):
        hidden = step.net.block(hidden)
    return plain(step, hidden, labels)


def teacher(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Frozen layers are layers."""
    with torch.no_grad():
        target = step.frozen(hidden)
    return plain(step, hidden, labels) + functional.mse_loss(hidden, target)


def layer_on_each_token(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A permutation copies rows, but none of them twice."""
    return plain(step, hidden.index_select(0, torch.randperm(TOKENS)), labels)


def masked_and_paired_elements(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A mask and a pair of indices select no whole rows."""
    positives = hidden[hidden > 0.0]
    diagonal = hidden[torch.arange(WIDTH), torch.arange(WIDTH)]
    return plain(step, hidden + positives.mean() + diagonal, labels)


def teacher_under_autocast(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Autocast copies frozen weights in each step."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        target = step.frozen(hidden)
    return plain(step, hidden, labels) + functional.mse_loss(hidden, target.float())


def long_attention(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Fused attention is a layer."""
    heads = hidden[None, None]
    for _ in range(12):
        heads = functional.scaled_dot_product_attention(heads, heads, heads)
    hidden = heads[0, 0]
    return plain(step, hidden, labels)


def attention_with_dropout(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """On the CPU, torch's attention has no fused kernel with dropout."""
    heads = hidden.view(1, 1, TOKENS, WIDTH)
    for _ in range(6):
        heads = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
    return plain(step, heads[0, 0], labels)


def attention_by_hand_with_dropout(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    weights = functional.dropout((hidden @ hidden.T).softmax(-1), 0.1)
    return plain(step, weights @ hidden, labels)


def saliency(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The program keeps the gradient of an input itself."""
    step.input = hidden.detach().requires_grad_()
    step.frozen.requires_grad_(False)
    step.backward(plain(step, step.frozen(step.input), labels))
    step.saliency = step.input.grad
    return plain(step, hidden, labels)


def dead_activations(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Nearly all outputs of a ReLU are zero; which ones depends on the input."""
    few = torch.eye(TOKENS, WIDTH) + 0.0 * hidden.detach()
    activations = functional.dropout((few - 0.5).relu(), 0.1)
    return plain(step, activations @ step.net.block[0].weight, labels)


def empty_batch(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    nothing = step.net.head(hidden[:0] * 2.0)
    return plain(step, hidden, labels) + nothing.sum()


def dead_units(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Most units of a ReLU are off for all inputs: their gradient is zero at each position."""
    with torch.no_grad():
        step.net.block[0].bias[8:] = -100.0  # from the second step on, which is the one that is judged
    return plain(step, hidden, labels)


def steered(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Python decides by a random number and by how many values there are."""
    if torch.rand(1).item() > 0.5:
        hidden = hidden + 1.0
    if len(torch.unique(hidden.detach())) > 1:
        hidden = hidden * 2.0
    return plain(step, hidden, labels)


def gradient_penalty(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    mixed = torch.rand(TOKENS, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(step.net.block(mixed).sum(), mixed, create_graph=True)
    return plain(step, hidden, labels) + (gradient.norm(dim=-1) - 1.0).square().mean()


def kept_for_later(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = step.net.head(hidden)
    step.last_probabilities = logits.detach().softmax(-1)
    return functional.cross_entropy(logits, labels)


def sampled_before(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The same layers run first without gradients, such as for samples that are shown."""
    with torch.no_grad():
        step.last_probabilities = step.net.head(step.net.block(hidden)).softmax(-1)
    return functional.cross_entropy(step.net.head(step.net.block(hidden)), labels)


def one_token_of_a_repeated_layer(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """A loop that applies one layer again and again has no last layer."""
    for _ in range(3):
        hidden = hidden + step.net.block(attended(hidden))
    return plain(step, hidden[:1], labels[:1])


def products_between_layers(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """Products cannot be fused."""
    mix = torch.mm(hidden.detach().T, hidden.detach())
    mixed = hidden
    for _ in range(100):
        mixed = torch.mm(mixed, mix)
    return plain(step, mixed, labels)


def test_what_depends_on_sparse_tensors_is_repeated_only_if_the_program_repeats_it() -> None:
    """Backward transposes the matrix once per layer. A program that makes the matrix once cannot avoid that."""
    step = Step().calls(graph_of_each_layer)
    repeated_names = {step.calls[number].name for number in repeated_calls(step, dead=())}
    assert repeated_names >= {"aten::_coalesce", "aten::_sparse_sum", "aten::index", "aten::div"}
    assert "aten::t" not in repeated_names
    assert not repeated_calls(Step().calls(graph_of_all_layers), dead=())


def test_the_only_backward_pass_of_a_repetition_is_needed() -> None:
    found = {operators.reason: operators for operators in Step().needless(sampled_before)}["repeated"]
    assert set(found.phase_shares) == {"forward"}


@pytest.mark.parametrize(
    "needed, reason",
    [
        (slices_at_once, "sliced"),
        (slices_of_many_tensors, "sliced"),
        (table_filled_row_by_row, "sliced"),
        (overlapping_windows, "sliced"),
        (largest_of_all_pairs, "broadcast"),
        (sampler, "unfused"),
        (cell_without_kernel, "unfused"),
        (mixture_of_experts, "gathered"),
        (discretised_states, "broadcast"),
        (cell_without_kernel, "cells"),
        (sums_by_index, "unused"),
        (transparent_samples, "ignored"),
        (largest_positions, "ignored"),
        (hardest_examples, "ignored"),
        (labels_of_the_model, "ignored"),
        (pooled_positions, "ignored"),
        (dead_positions, "ignored"),
        (satisfied_margins, "ignored"),
        (decoder, "cells"),
        (decoder_with_a_layer, "cells"),
        (fed_with_its_output("lstm"), "cells"),
        (fed_with_its_output("gru"), "cells"),
        (bidirectional_lstm, "cells"),
        (lstm_of_each_agent, "cells"),
        (lstm_without_earlier_states, "cells"),
        (lstm_with_masked_states, "cells"),
        (penalized_memory, "cells"),
        (saliency, "unused"),
        (dropped_states, "cells"),
        (reset_memory, "cells"),
        (normalized_states, "cells"),
        (decoder, "looped"),
        (head_whose_output_is_fed_back, "looped"),
        (attention_by_hand_with_dropout, "scores"),
        (crossed_kernels, "summed"),
        (transposed_result, "summed"),
        (dilated_branches, "summed"),
        (normalized_branches, "summed"),
        (gated_branches, "summed"),
        (heads_with_own_losses, "summed"),
        (layers_of_halves, "summed"),
        (scores_of_all_pairs, "summed"),
        (buffer_that_decays, "constant"),
        (masks_of_lengths, "constant"),
        (short_causal_mask, "causal"),
        (mask_of_a_window, "causal"),
        (mask_with_distances, "causal"),
        (mask_of_documents, "causal"),
        (mask_of_each_sample, "causal"),
        (mask_of_one_sample, "causal"),
        (masked_and_paired_elements, "indexed"),
        (norm_of_small_parameters, "small_parameters"),
        (logits_of_a_convolution, "transposed"),
        (dead_activations, "zeros"),
        (sparse_activations, "zeros"),
        (logged_penalty_without_weight, "cancelled"),
        (norms_of_weights, "figures"),
        (products_between_layers, "unfused"),
        (one_token_of_the_output, "ignored"),
        (padded_sequences, "looped"),
        (padded_sequences, "copied"),
        (packed_sequences_of_one_length, "packed"),
        *((packed_sequences_of_different_lengths, reason) for reason in ("packed_equal", "sliced", "looped", "copied")),
        (one_token_of_a_repeated_layer, "ignored"),
        (one_token_of_a_repeated_layer, "ignored_at_last"),
        (masked_loss, "ignored_at_last"),
        (two_heads_of_one_class, "ignored_at_last"),
        (kept_for_later, "unused"),
    ],
)
def test_what_has_no_remedy_is_not_needless(needed: Callable[[Step, Tensor, Tensor], Tensor], reason: str) -> None:
    reasons = [found.reason for found in Step().needless(needed)]
    assert reason not in reasons


@pytest.mark.parametrize("shares, saved", [([0.2, 1.1], 0.35), ([0.5, 1.6], None), ([None, None], None)])
def test_half_precision_is_slow_if_all_its_operators_together_are(
    shares: list[float | None], saved: float | None
) -> None:
    """Products may be faster in half precision than in float32, and attention slower."""
    large = {"is_host_read": True, "elements": 8192, "size": 8192}
    calls = [
        made_call("aten::embedding", writes=(number,), has_half_input=True, float32_share=share, **large)
        for number, share in enumerate(shares)
    ]
    found = [entry for entry in needless_operators(StepCalls(calls=calls)) if entry.reason == "narrow"]
    assert [entry.phase_shares["forward"] for entry in found] == ([] if saved is None else [pytest.approx(saved)])


@pytest.mark.parametrize("share, saved", [(0.5, 0.5), (0.9, None), (-0.2, 1.2)])
def test_another_layout_of_images_is_reported_if_it_saves_a_fifth(share: float, saved: float | None) -> None:
    """It may save more than the operator itself, but no more than all of an operator is needless."""
    call = made_call("aten::convolution", is_host_read=True, elements=8192, size=8192, channels_last_share=share)
    found = [entry for entry in needless_operators(StepCalls(calls=[call])) if entry.reason == "channels_first"]
    assert [entry.phase_shares["forward"] for entry in found] == ([] if saved is None else [saved])
    assert all(entry.share <= 1.0 for entry in found)


@pytest.mark.parametrize(
    "name, makes_double, is_found",
    [("aten::mm", True, True), ("aten::mm", False, False), ("aten::linalg_solve_ex", True, False)],
)
def test_a_model_of_float64_is_slow_in_large_operators(name: str, makes_double: bool, is_found: bool) -> None:
    """Small operators are mostly overhead. Solving a system may need the digits of float64."""
    call = made_call(name, elements=8192, size=8192, is_host_read=True, makes_double=makes_double)
    step = StepCalls(calls=[call], kept=frozenset({1}), is_double=True)
    assert ("double" in [found.reason for found in needless_operators(step)]) == is_found


@pytest.mark.parametrize(
    "needed",
    [plain, accumulated, two_batches, checkpointed, two_draws, changed_copies, acting, attention, recurrent,
     layer_on_each_token, teacher, dead_units, steered, gradient_penalty],
)  # fmt: skip
def test_what_training_needs_is_not_needless(needed: Callable[[Step, Tensor, Tensor], Tensor]) -> None:
    assert Step(dropout=0.1).needless(needed) == []


def gradient_of_a_view(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The last node of forward is a view's, and backward begins without a call that makes its gradient."""
    gradient = torch.ones(TOKENS, CLASSES // 8)
    for _ in range(2):
        part = step.net.head(hidden.detach()).view(TOKENS, 8, -1)[:, 0]
        step.operators.phase = "backward"
        part.backward(gradient=gradient)
        step.operators.phase = "forward"
    return plain(step, hidden, labels)


def test_a_call_of_backward_is_not_its_own_forward_call() -> None:
    """Its lines would be searched without end."""
    calls = Step().calls(gradient_of_a_view).calls
    assert all(call.forward is None or call.forward < number for number, call in enumerate(calls))


def costly_losses(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The losses take more time than the layers, as in a small network with a large vocabulary."""
    logits = step.net.head(hidden)
    losses = [functional.cross_entropy(part, labels) for part in logits[None].repeat(12, 1, 1)]
    return torch.stack(losses).sum()


@pytest.mark.parametrize(
    "harmless",
    [teacher_under_autocast, long_attention, empty_batch, costly_losses, attention_by_hand, attention_with_dropout],
)
def test_layers_are_no_side_work(harmless: Callable[[Step, Tensor, Tensor], Tensor]) -> None:
    reasons = [found.reason for found in Step().needless(harmless)]
    assert {"side_work", "unfused"}.isdisjoint(reasons)


def propagate(hidden: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    for _ in range(100):
        hidden = (0.5 * hidden).index_add(0, targets, hidden.index_select(0, sources))
    return hidden


def propagation(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    """The layers take so little time that the whole step counts as a place without layers."""
    sources, targets = torch.randint(TOKENS, (2, TOKENS))
    return plain(step, propagate(hidden, sources, targets), labels)


def test_the_function_is_named_that_takes_the_time_of_the_whole_step() -> None:
    (found,) = [found for found in Step().needless(propagation) if found.reason == "unfused"]
    assert found.function == "propagate"
    # In each round, two products with 0.5, a sum of gradients, and zeros for one of them. Four more calls copy rows.
    assert found.count == pytest.approx(4 * 100, abs=4)


def test_the_gradients_of_a_weight_in_a_loop_are_added_up_needlessly() -> None:
    """Ten calls of a layer, their backward passes, and nine sums of the gradients of its weight."""
    calls = Step().calls(head_in_a_decoder)
    looped = calls_in_loops(calls)
    sums: list[int] = []
    for number in looped:
        call = calls.calls[number]
        if call.name in ("aten::add", "aten::add_") and call.elements == CLASSES * WIDTH:
            sums.append(number)
    assert len(sums) == 9
    assert [looped[number] for number in sums] == pytest.approx([0.9] * 9)


@pytest.mark.parametrize(
    "sizes, calling_s",
    [
        ([10, 20, 30, 9000], 2.0),  # the median of the small calls
        ([9000, 9000, 9000, 9000], 1.0),  # without any, no call is shorter than its overhead
    ],
)
def test_the_overhead_of_a_call_is_known_without_small_calls(sizes: list[int], calling_s: float) -> None:
    calls = [made_call(seconds=seconds, size=size) for seconds, size in zip([1.0, 2.0, 3.0, 9.0], sizes, strict=True)]
    assert overhead_of_calling_s(StepCalls(calls=calls)) == calling_s


def test_long_chains_of_joins_are_searched_once() -> None:
    """Each joins the two before it: a search from each to its beginning would take 2^n steps, and be too deep."""
    calls = [made_call("aten::relu", writes=(number,), elements=64) for number in range(2)]
    for number in range(2, 3000):
        calls.append(made_call("aten::cat", (number - 2, number - 1), writes=(number,), elements=128))
    joined, weight = 2999, 3001
    product = Product(1, Operand(joined, 2, 64), Operand(weight, 64, 64))
    calls.append(made_call("aten::mm", (joined, weight), writes=(3002,), elements=128, product=product))
    assert layers_on_copied_rows(StepCalls(calls=calls, trained=frozenset({weight}))) == {}


def test_a_step_with_sparse_gradients_is_recorded() -> None:
    step = Step()
    step.net.table.sparse = True
    step.generator = torch.optim.SGD(step.net.parameters(), lr=0.1)
    step.keeps_gradients = True
    assert step.needless(large_table) == []


def sparse_adjacency(step: Step, hidden: Tensor, labels: Tensor) -> Tensor:
    adjacency = torch.eye(TOKENS).to_sparse()
    return plain(step, hidden + torch.mm(adjacency, hidden) + torch.mm(adjacency, hidden), labels)


def test_a_step_with_products_of_sparse_matrices_is_recorded() -> None:
    calls = Step().calls(sparse_adjacency).calls
    assert sum(call.phase == "forward" and call.name == "aten::mm" for call in calls) == 2


def test_torchs_methods_are_as_they_were() -> None:
    before = {name: vars(Tensor).get(name) for name in ("numpy", "tolist", "data_ptr", "__array__")}
    Step().needless(metric_of_numpy)
    assert {name: vars(Tensor).get(name) for name in before} == before


@pytest.mark.parametrize(
    "loss_of, shares",
    [
        (plain, {}),
        (sampler, {}),  # whose gradients are not differentiated
        (forces_of_molecules, {"forward": 1.0, "backward": 1.0}),
    ],
)
def test_what_contains_a_gradient_that_is_differentiated_is_not_compiled(
    loss_of: Callable[[Step, Tensor, Tensor], Tensor], shares: dict[str, float]
) -> None:
    assert uncompiled_shares(Step().calls(loss_of)) == shares


def test_recurrent_layers_are_not_compiled() -> None:
    """By the clock of ``Step`` each call takes as long as any other."""
    calls = Step().calls(padded_sequences).calls
    of_layer = [call for call in calls if call.phase == "forward" and call.is_of_recurrent_layer]
    forward = [call for call in calls if call.phase == "forward"]
    shares = uncompiled_shares(StepCalls(calls=calls))
    assert shares["forward"] == pytest.approx(len(of_layer) / len(forward), rel=0.01)
    assert 0.5 < shares["backward"] < 1.0


def test_the_backward_passes_of_a_sampler_are_a_share_of_forward() -> None:
    """By the clock of ``Step`` each call takes as long as any other."""
    forward = [call for call in Step().calls(sampler).calls if call.phase == "forward"]
    gradients = [call for call in forward if call.name == "aten::convolution_backward"]
    assert len(gradients) == 8
    assert backward_share_of_forward(Step().calls(sampler)) == pytest.approx(8 / len(forward), rel=0.01)
    assert backward_share_of_forward(Step().calls(plain)) == 0.0
