"""Traces computed from a shape, without running anything.

[Note: the memory model]
Non-model bytes of a moment are the peak *during* it. Symbols: ``T`` tokens (batch x sequence), ``e`` bytes of a
computed element, ``h`` hidden size, ``q`` and ``k`` width of all query heads and of all key heads, ``a`` heads,
``f`` MLP width, ``V`` vocabulary, ``B`` batch, ``S`` sequence. ``x = eTh`` is one hidden-state tensor.

    what                          bytes                                       why it lives
    inputs                        16T (BERT 32T)                              token and label numbers, 8 bytes each
    embedding, kept (BERT)        x + 8T                                      its norm's input and statistics
    block input                   x                                           the checkpoint; also the residual
    attention keeps               eT(2h + 2q + 2k) + 8T + 4aT                 norm output, q k v, attention output, the
                                                                              sum with the residual; statistics
      with query/key norms        + eT(q + k) + 4(a + k/d)T                   their inputs and statistics
      materialised                + e a B S S                                 softmax output
    MLP keeps                     eT(h + 2f) + 8T, gated eT(h + 4f) + 8T      norm output, activation's input and output
                                                                              (and the second projection, the product)
    dropout                       + Th attention, Th MLP, Th embedding        byte masks
    not fused: a norm of width w  + ewT, and 4wT if e < 4                     rotary families: values before scaling
                                                                              and an fp32 copy of the input
    not fused: activation         + 3eTf kept, + eTf at work                  GPT-2: 0.5x, tanh, 1 + tanh
    no-grad forward of attention  eT(2q + 2k + h), materialised + 2e a B S S  the widest operator, in and out
    no-grad forward of the MLP    eT(h + 2f), gated eT(h + 3f)                the same
    backward of attention         eT(h + 2q + 2k) + 4T(q + a)                 gradients alive at the attention kernel,
                                                                              its fp32 accumulator and row sums
      materialised                + 2e a B S S                                gradients of softmax and scores
    backward of the MLP           eT(h + f), gated eT(h + 2f)                 gradients alive at the activation
    gradient buffer               e x largest tensor                          autograd hands a gradient over in memory
                                                                              of its own, then it is stored
    head, forward                 nx + 12RV; n = 2, BERT 4                    norm in and out (BERT's transform: four),
                                                                              logits and what the loss makes of them;
                                                                              R = T, or the chunk of a chunked loss
      chunked                     nx + max(12RV, x + eRV + gradient buffer)   whose gradients are made in forward
    head, backward                nx + x + max(12RV, eRV + gradient buffer)   4Vh more where there are several chunks:
                                                                              their sum in fp32
    head in tiles                 [Note: the head in tiles]                   each tile is used by itself
    embedding, forward            2x + eSh                                    token and position rows, their sum
    embedding, backward           x + gradient buffer                         the table's gradient is dense
    table on the host             no table: no gradient buffer for it         rows arrive, and leave as gradients

With checkpointing a block keeps only its input; in backward it is recomputed, keeps everything, and gives it back
as its parts are differentiated. Checkpoints alive count up in forward and down in backward. Offloaded, a checkpoint
is an `Activation`: in forward it exists beside the block's input while it is saved; in backward it *is* the block's
input until attention's backward is done.

Sources: the per-block sum for GPT-2, 32 bytes x T x h with 16-bit elements, is that of Korthikanti et al. (arXiv
2205.05198, section 4.1: 34 with its dropout masks) less the scores that attention kernels do not write (Dao et al.,
arXiv 2205.14135); the kernels' fp32 accumulator is that of their backward. 12 bytes a logit are three fp32 tensors:
log-softmax, its gradient, the logits' gradient (in forward: 16-bit logits and two fp32 tensors, 10). Left out: kernel
workspaces, fragmentation, the device context (named reserves elsewhere), attention masks, sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from ps_core._errors import InvalidInput
from ps_core._trace import Activation, Moment, Phase, Tensor, Trace
from ps_core._workloads.apart import TiledHead, check_apart, in_tiles
from ps_core._workloads.shapes import Family, Norm, Part, TransformerShape, placed_tensors


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one process computes in one micro-batch, and how."""

    batch: int = 4
    seq: int = 1024
    precision_bytes: int = 2
    """Bytes of an element of parameters, activations and gradients: 2 or 4."""
    checkpointing: bool = True
    """Keep only every block's input and recompute the rest in backward."""
    offload_checkpoints: bool = False
    """Let the planner move checkpoints off the compute tier."""
    chunked_loss: bool = False
    """Compute head and loss ``loss_chunk_tokens`` at a time, again in backward, instead of holding all logits."""
    loss_chunk_tokens: int = 1024
    head_tiles: int = 1
    """Cut a head of its own into so many tensors, each a part of the words and used by itself."""
    cpu_embedding: bool = False
    """Look tokens up in the host's memory: the table is in no moment, and not among the trace's tensors."""
    logit_bytes: int = 12
    """Bytes of all forms of one logit together."""
    materialised_attention: bool = False
    """Attention that writes its scores to memory."""
    dropout: bool = False
    fused: bool = True
    """Whether norms and activations are single operators. In transformers GPT-2's activation and the rotary families'
    norms are not, and keep what their pieces need."""
    gradient_buffers: bool = True
    """Whether a gradient arrives in memory of its own before it is stored; False if kernels write it in place."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise InvalidInput(f"workload: {field.name} must be true or false, found {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInput(f"workload: {field.name} must be a whole number of at least 1, found {value!r}")
        if self.precision_bytes not in (2, 4):
            raise InvalidInput(f"workload: precision_bytes must be 2 or 4, found {self.precision_bytes}")
        if self.offload_checkpoints and not self.checkpointing:
            raise InvalidInput("workload: offload_checkpoints needs checkpointing")

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.seq


@dataclass(frozen=True)
class _Costs:
    """Bytes and operations of each kind of moment; see [Note: the memory model] for every formula."""

    shape: TransformerShape
    work: Workload

    def elements(self, width: int) -> int:
        """Bytes of a computed tensor of that width for every token."""
        return self.work.precision_bytes * self.work.tokens * width

    @cached_property
    def state(self) -> int:
        """One hidden-state tensor, ``x``."""
        return self.elements(self.shape.hidden)

    @cached_property
    def scores(self) -> int:
        """One materialised score matrix of all heads; 0 where the kernel keeps scores to itself."""
        if not self.work.materialised_attention:
            return 0
        return self.work.precision_bytes * self.shape.heads * self.work.batch * self.work.seq**2

    @cached_property
    def inputs(self) -> int:
        return (16 if self.shape.causal else 32) * self.work.tokens

    @cached_property
    def embedding_kept(self) -> int:
        return self.masks + (self.state + 8 * self.work.tokens if self.shape.post_norm else 0)

    @cached_property
    def projected(self) -> int:
        """Queries, keys, values and the attention output."""
        return self.elements(2 * self.shape.query_width + 2 * self.shape.kv_width)

    @cached_property
    def attention_kept(self) -> int:
        shape, tokens = self.shape, self.work.tokens
        kept = 2 * self.state + self.projected + (8 + 4 * shape.heads) * tokens + self.scores
        if shape.qk_norm:
            width = shape.query_width + shape.kv_width
            kept += self.elements(width) + 4 * (shape.heads + shape.kv_heads) * tokens + self.norm_pieces(width)
        return kept + self.masks + self.norm_pieces(shape.hidden)

    @cached_property
    def mlp_kept(self) -> int:
        shape, wide = self.shape, (4 if self.shape.gated_mlp else 2) + (3 if self.composed_activation else 0)
        kept = self.elements(shape.hidden + wide * shape.ffn) + 8 * self.work.tokens
        return kept + self.masks + self.norm_pieces(shape.hidden)

    @property
    def composed_activation(self) -> bool:
        """Whether the activation is made of several operators."""
        return self.shape.family is Family.GPT2 and not self.work.fused

    def norm_pieces(self, width: int) -> int:
        """What a norm over that width keeps if it is made of several operators."""
        if self.work.fused or self.shape.norm is Norm.LAYER:
            return 0
        return self.elements(width) + (4 * self.work.tokens * width if self.work.precision_bytes < 4 else 0)

    @cached_property
    def masks(self) -> int:
        return self.work.tokens * self.shape.hidden if self.work.dropout else 0

    @cached_property
    def attention_forward(self) -> int:
        return self.projected + self.state + 2 * self.scores

    @cached_property
    def mlp_forward(self) -> int:
        wide = 3 if self.shape.gated_mlp or self.composed_activation else 2
        return self.elements(self.shape.hidden + wide * self.shape.ffn)

    @cached_property
    def attention_backward(self) -> int:
        kernel = 4 * self.work.tokens * (self.shape.query_width + self.shape.heads)
        return self.state + self.projected + 2 * self.scores + kernel

    @cached_property
    def mlp_backward(self) -> int:
        wide = 2 if self.shape.gated_mlp or self.composed_activation else 1
        return self.elements(self.shape.hidden + wide * self.shape.ffn)

    @cached_property
    def loss_rows(self) -> int:
        work = self.work
        return min(work.tokens, work.loss_chunk_tokens) if work.chunked_loss else work.tokens

    @cached_property
    def logits(self) -> int:
        return self.work.logit_bytes * self.loss_rows * self.shape.vocabulary

    def buffer(self, numel: int) -> int:
        """Bytes in which gradients of that many elements arrive."""
        return self.work.precision_bytes * numel if self.work.gradient_buffers else 0

    @cached_property
    def head_kept(self) -> int:
        """What the head keeps besides logits, its input included."""
        return (4 if self.shape.post_norm else 2) * self.state + self.norm_pieces(self.shape.hidden)

    @cached_property
    def tiled_head(self) -> TiledHead | None:
        """None where the head is whole, or all logits are there at once."""
        work = self.work
        if work.head_tiles == 1 or not work.chunked_loss:
            return None
        return TiledHead(
            shape=self.shape,
            tiles=work.head_tiles,
            tokens=work.tokens,
            rows=self.loss_rows,
            element_bytes=work.precision_bytes,
            gradient_buffers=work.gradient_buffers,
        )

    @cached_property
    def head_forward(self) -> int:
        """A loss in chunks makes the gradients at once, so it may need as much as backward."""
        if self.tiled_head is not None:
            return self.head_kept + self.tiled_head.forward
        made = self.state + self.head_gradient if self.work.chunked_loss else 0
        return self.head_kept + max(self.logits, made)

    @cached_property
    def head_backward(self) -> int:
        if self.tiled_head is not None:
            return self.head_kept + self.state + self.tiled_head.backward
        return self.head_kept + self.state + max(self.logits, self.head_gradient)

    @cached_property
    def head_gradient(self) -> int:
        """Logits' gradient, and that of the head's matrix: several chunks' sum is in fp32, beside it the newest."""
        shape, work = self.shape, self.work
        words = -(-shape.vocabulary // work.head_tiles)
        weight = self.buffer(words * shape.hidden)
        if self.loss_rows < work.tokens:
            weight += 4 * weight // work.precision_bytes
        return work.precision_bytes * self.loss_rows * shape.vocabulary + weight

    @cached_property
    def attention_flops(self) -> float:
        shape, tokens = self.shape, self.work.tokens
        projections = 2.0 * tokens * shape.hidden * (2 * shape.query_width + 2 * shape.kv_width)
        return projections + 4.0 * tokens * self.work.seq * shape.query_width

    @cached_property
    def mlp_flops(self) -> float:
        return (3 if self.shape.gated_mlp else 2) * 2.0 * self.work.tokens * self.shape.hidden * self.shape.ffn

    @cached_property
    def head_flops(self) -> float:
        shape, tokens = self.shape, self.work.tokens
        flops = 2.0 * tokens * shape.hidden * shape.vocabulary
        if shape.post_norm:
            flops += 2.0 * tokens * shape.hidden**2
        if shape.next_sentence:
            flops += 2.0 * self.work.batch * shape.hidden * (shape.hidden + 2)
        return flops


def analytic_trace(shape: TransformerShape, workload: Workload) -> Trace:
    """What one micro-batch of that work on that shape touches: embedding, attention and MLP of each block, head."""
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
    """Makes the moments of one trace from its costs and from which tensors each part of the model has."""

    def __init__(self, shape: TransformerShape, work: Workload) -> None:
        self.work = work
        self.costs = costs = _Costs(shape, work)
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
        """Bytes alive outside the block that runs, when that many blocks have kept what backward needs of them."""
        costs = self.costs
        each = costs.state if self.work.checkpointing else costs.state + costs.attention_kept + costs.mlp_kept
        held = 0 if self.work.offload_checkpoints else each * blocks
        return costs.inputs + costs.embedding_kept + held

    def largest(self, indices: tuple[int, ...]) -> int:
        """Bytes in which the largest of these tensors' gradients arrives."""
        return self.costs.buffer(max((self.tensors[index].numel for index in indices), default=0))

    def embedding(self) -> Moment:
        return Moment(
            name="embedding",
            phase=Phase.FORWARD,
            reads=self.embedding_tensors,
            nonmodel_bytes=self.kept(0) + 2 * self.costs.state + self.positions_bytes,
        )

    def block(self, layer: int) -> tuple[Moment, Moment]:
        costs, work = self.costs, self.work
        before = self.kept(layer)
        own = 0 if work.offload_checkpoints else costs.state
        if work.checkpointing:
            attention = costs.state + costs.attention_forward
            mlp = own + costs.state + costs.mlp_forward
        else:
            attention = costs.state + costs.attention_kept + max(costs.state, costs.scores)
            mlp = costs.state + costs.attention_kept + costs.mlp_kept + costs.state
        return (
            Moment(
                name=f"layer {layer} attention",
                phase=Phase.FORWARD,
                reads=self.parts[Part.ATTENTION, layer],
                makes=(layer,) if work.offload_checkpoints else (),
                nonmodel_bytes=before + attention,
                flops=costs.attention_flops,
            ),
            Moment(
                name=f"layer {layer} mlp",
                phase=Phase.FORWARD,
                reads=self.parts[Part.MLP, layer],
                nonmodel_bytes=before + mlp,
                flops=costs.mlp_flops,
            ),
        )

    def head_part(self, tile: int) -> tuple[str, tuple[int, ...]]:
        """A moment's name, and what it computes with: the whole head, or a tile (the norm is the first one's)."""
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
        )

    def head_backward(self, tile: int) -> Moment:
        name, reads = self.head_part(tile)
        return Moment(
            name=f"{name} backward",
            phase=Phase.BACKWARD,
            reads=reads,
            grads=reads,
            nonmodel_bytes=self.kept(self.layers) + self.costs.head_backward,
            flops=self.loss_runs * self.costs.head_flops / self.work.head_tiles,
        )

    def block_backward(self, layer: int) -> tuple[Moment, ...]:
        costs, work = self.costs, self.work
        attention, mlp = self.parts[Part.ATTENTION, layer], self.parts[Part.MLP, layer]
        takes = (layer,) if work.offload_checkpoints else ()
        # The block's input (unless it is an activation of the trace) and the gradient that comes in from above.
        base = self.kept(layer) + (0 if work.offload_checkpoints else costs.state) + costs.state
        both = costs.attention_kept + costs.mlp_kept
        recompute = Moment(
            name=f"layer {layer} recompute",
            phase=Phase.BACKWARD,
            reads=(*attention, *mlp),
            takes=takes,
            nonmodel_bytes=base + max(costs.attention_kept + max(costs.state, costs.scores), both + costs.state),
            flops=costs.attention_flops + costs.mlp_flops,
        )
        return (
            *((recompute,) if work.checkpointing else ()),
            Moment(
                name=f"layer {layer} mlp backward",
                phase=Phase.BACKWARD,
                # A checkpointed block keeps every parameter it touches until its gradients exist.
                reads=(*attention, *mlp) if work.checkpointing else mlp,
                grads=mlp,
                takes=takes,
                nonmodel_bytes=base + both + costs.mlp_backward + self.largest(mlp),
                flops=2 * costs.mlp_flops,
            ),
            Moment(
                name=f"layer {layer} attention backward",
                phase=Phase.BACKWARD,
                reads=attention,
                grads=attention,
                takes=takes,
                nonmodel_bytes=base + costs.attention_kept + costs.attention_backward + self.largest(attention),
                flops=2 * costs.attention_flops,
            ),
        )

    def embedding_backward(self) -> Moment:
        return Moment(
            name="embedding backward",
            phase=Phase.BACKWARD,
            reads=self.embedding_norm,
            grads=self.embedding_tensors,
            nonmodel_bytes=self.kept(0) + self.costs.state + self.largest(self.embedding_tensors),
        )
