"""Make traces from a shape, without running anything: the moments, with bytes and operations by formulas."""

from __future__ import annotations

from ps_core._errors import InvalidInput
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._workloads.head_and_token_table import check_apart, in_tiles
from ps_core._workloads.shapes import Part, TransformerShape, placed_tensors
from ps_core._workloads.transformer_costs import Costs
from ps_core._workloads.workload import Workload

_EMBEDDING = 5
"""Operators of an embedding, forward or backward: look-ups and their sum."""
_BACK = 2
"""Operators in backward for each one in forward; 1.6 to 2.2 were counted."""


def analytic_trace(shape: TransformerShape, workload: Workload) -> Trace:
    """Return what one micro-batch touches: embedding, attention and MLP of each block, head."""
    if workload.seq > shape.positions:
        raise InvalidInput(f"{shape.name} has {shape.positions} positions, too few for a sequence of {workload.seq}")
    check_apart(shape, head_tiles=workload.head_tiles, cpu_embedding=workload.cpu_embedding)
    builder = _Builder(shape, workload)
    blocks = range(shape.layers)
    moments = [builder.embedding()]
    for layer in blocks:
        moments += builder.block(layer)
    tiles = range(workload.head_tiles)
    moments += [builder.head(tile) for tile in tiles]
    moments += [builder.head_backward(tile) for tile in reversed(tiles)]
    for layer in reversed(blocks):
        moments += builder.block_backward(layer)
    moments.append(builder.embedding_backward())
    return Trace(
        model=shape.name,
        tensors=builder.tensors,
        moments=tuple(moments),
        activations=builder.activations,
        tokens=workload.tokens,
    )


class _Builder:
    """Make the moments of one trace from its costs and from the tensors of each part of the model."""

    def __init__(self, shape: TransformerShape, work: Workload) -> None:
        self.work = work
        self.costs = costs = Costs(shape, work)
        placed = tuple(in_tiles(placed_tensors(shape), shape, work.head_tiles))
        # The token table is the first tensor of every family.
        placed = placed[1:] if work.cpu_embedding else placed
        self.tensors = tuple(Tensor(name=tensor.name, numel=tensor.numel) for tensor in placed)
        parts: dict[tuple[Part, int], list[int]] = {}
        for index, tensor in enumerate(placed):
            parts.setdefault((tensor.part, tensor.layer), []).append(index)
        self.parts = {key: tuple(indices) for key, indices in parts.items()}
        self.activations: tuple[Activation, ...] = ()
        if work.offload_checkpoints:
            self.activations = tuple(
                Activation(name=f"layer {layer} input", bytes=costs.state) for layer in range(shape.layers)
            )
        self.layers = shape.layers
        self.embedding_tensors = self.parts.get((Part.EMBEDDING, -1), ())
        # Tied, the head is computed with the token table.
        self.head_tensors = (*self.parts[Part.HEAD, -1], *(self.embedding_tensors[:1] if shape.tied_head else ()))
        # Looking rows up needs their numbers in backward, not the table; BERT's norm after it does need its weights.
        self.embedding_norm = tuple(index for index in self.embedding_tensors if "LayerNorm" in placed[index].name)
        self.positions_bytes = work.precision_bytes * work.seq * shape.hidden if shape.learned_positions else 0
        self.loss_runs = 3 if work.chunked_loss else 2

    def kept(self, blocks: int) -> int:
        """Return the bytes alive outside the running block, when so many blocks have saved tensors for backward."""
        costs = self.costs
        each = costs.state if self.work.checkpointing else costs.state + costs.attention_kept + costs.mlp_kept
        held = 0 if self.work.offload_checkpoints else each * blocks
        return costs.inputs + costs.embedding_kept + held

    def saved(self, layer: int) -> tuple[int, ...]:
        """Return the activation that a block's input is, if it is moved and there is such a block.

        It is copied into its slot when the input was made, and out of it before the block is recomputed. So the moments
        before the block's own make it and take it.
        """
        return (layer,) if self.work.offload_checkpoints and 0 <= layer < self.layers else ()

    def largest(self, indices: tuple[int, ...]) -> int:
        """Return the bytes of the largest of these tensors' gradients as it arrives."""
        return self.costs.buffer(max((self.tensors[index].numel for index in indices), default=0))

    def embedding(self) -> Moment:
        return Moment(
            name="embedding",
            phase=Phase.FORWARD,
            reads=self.embedding_tensors,
            makes=self.saved(0),
            nonmodel_bytes=self.kept(0) + 2 * self.costs.state + self.positions_bytes,
            launches=_EMBEDDING,
        )

    def block(self, layer: int) -> tuple[Moment, Moment]:
        costs, work = self.costs, self.work
        before = self.kept(layer)
        if work.checkpointing:
            attention = costs.state + costs.attention_forward
            mlp = 2 * costs.state + costs.mlp_forward
        else:
            attention = costs.state + costs.attention_kept + max(costs.state, costs.scores)
            mlp = costs.state + costs.attention_kept + costs.mlp_kept + costs.state
        return (
            Moment(
                name=f"layer {layer} attention",
                phase=Phase.FORWARD,
                reads=self.parts[Part.ATTENTION, layer],
                nonmodel_bytes=before + attention,
                flops=costs.attention_flops,
                launches=costs.attention_launches,
            ),
            Moment(
                name=f"layer {layer} mlp",
                phase=Phase.FORWARD,
                reads=self.parts[Part.MLP, layer],
                makes=self.saved(layer + 1),
                nonmodel_bytes=before + mlp,
                flops=costs.mlp_flops,
                launches=costs.mlp_launches,
            ),
        )

    def head_part(self, tile: int) -> tuple[str, tuple[int, ...]]:
        """Return a moment's name and tensors: the whole head, or a tile (the first one has the norm)."""
        tiles = self.work.head_tiles
        if tiles == 1:
            return "head", self.head_tensors
        first = len(self.head_tensors) - tiles
        return f"head tile {tile}", (*self.head_tensors[: 0 if tile else first], self.head_tensors[first + tile])

    def head(self, tile: int) -> Moment:
        name, reads = self.head_part(tile)
        return Moment(
            name=name,
            phase=Phase.FORWARD,
            reads=reads,
            nonmodel_bytes=self.kept(self.layers) + self.costs.head_forward,
            flops=self.costs.head_flops / self.work.head_tiles,
            launches=self.costs.loss_launches,
        )

    def head_backward(self, tile: int) -> Moment:
        name, reads = self.head_part(tile)
        return Moment(
            name=f"{name} backward",
            phase=Phase.BACKWARD,
            reads=reads,
            grads=reads,
            takes=() if tile else self.saved(self.layers - 1),
            nonmodel_bytes=self.kept(self.layers) + self.costs.head_backward,
            flops=self.loss_runs * self.costs.head_flops / self.work.head_tiles,
            launches=self.loss_runs * self.costs.loss_launches,
        )

    def block_backward(self, layer: int) -> tuple[Moment, ...]:
        costs, work = self.costs, self.work
        attention, mlp = self.parts[Part.ATTENTION, layer], self.parts[Part.MLP, layer]
        # The block's input and the gradient that comes in from above.
        base = self.kept(layer) + 2 * costs.state
        both = costs.attention_kept + costs.mlp_kept
        recompute = Moment(
            name=f"layer {layer} recompute",
            phase=Phase.BACKWARD,
            reads=(*attention, *mlp),
            nonmodel_bytes=base + max(costs.attention_kept + max(costs.state, costs.scores), both + costs.state),
            flops=costs.attention_flops + costs.mlp_flops,
            launches=costs.attention_launches + costs.mlp_launches,
        )
        return (
            *((recompute,) if work.checkpointing else ()),
            Moment(
                name=f"layer {layer} mlp backward",
                phase=Phase.BACKWARD,
                # A checkpointed block keeps every parameter it touches until its gradients exist.
                reads=(*attention, *mlp) if work.checkpointing else mlp,
                grads=mlp,
                nonmodel_bytes=base + both + costs.mlp_backward + self.largest(mlp),
                flops=2 * costs.mlp_flops,
                launches=_BACK * costs.mlp_launches,
            ),
            Moment(
                name=f"layer {layer} attention backward",
                phase=Phase.BACKWARD,
                reads=attention,
                grads=attention,
                takes=self.saved(layer - 1),
                nonmodel_bytes=base + costs.attention_kept + costs.attention_backward + self.largest(attention),
                flops=2 * costs.attention_flops,
                launches=_BACK * costs.attention_launches,
            ),
        )

    def embedding_backward(self) -> Moment:
        return Moment(
            name="embedding backward",
            phase=Phase.BACKWARD,
            reads=self.embedding_norm,
            grads=self.embedding_tensors,
            nonmodel_bytes=self.kept(0) + self.costs.state + self.largest(self.embedding_tensors),
            launches=_EMBEDDING,
        )
