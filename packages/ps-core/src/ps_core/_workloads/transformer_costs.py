"""Compute bytes and operations of each part of a transformer from its shape.

[Note: the memory model]
Non-model bytes of a moment are the peak *during* it. ``T`` is the number of tokens, batch ``B`` times sequence ``S``.
``e`` is the bytes of a computed element, ``h`` the hidden size, ``f`` the MLP's width, ``V`` the vocabulary. ``a`` is
the number of heads. ``q`` is the width of all query heads, ``k`` of all key heads. ``x = eTh`` is one hidden-state
tensor.

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
as its parts are differentiated. Inputs kept count up in forward and down in backward. Offloaded, such an input
is an `Activation`, which has memory of its own. It is copied when the block's input is made. In backward the
input is copied from it before the block is recomputed, and lives until attention's backward is done.

The per-block sum for GPT-2 is 32 bytes x T x h with 16-bit elements. It is that of Korthikanti and others (arXiv
2205.05198, section 4.1: 34 with its dropout masks). The scores that attention kernels do not write are subtracted (Dao
and others, arXiv 2205.14135). The fp32 accumulator is that of these kernels' backward. Three fp32 tensors make 12 bytes
a logit: log-softmax, its gradient, the logits' gradient. In forward there are 16-bit logits and two fp32 tensors: 10.
Left out are kernel workspaces, fragmentation, the device context (reserves elsewhere), attention masks, sliding
windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ps_core._workloads.head_and_token_table import TiledHead
from ps_core._workloads.shapes import Family, Norm, TransformerShape
from ps_core._workloads.workload import Workload


@dataclass(frozen=True)
class Costs:
    """Bytes and operations of each kind of moment; see [Note: the memory model] for every formula."""

    shape: TransformerShape
    work: Workload

    def elements(self, width: int) -> int:
        """Return the bytes of a computed tensor of that width for every token."""
        return self.work.precision_bytes * self.work.tokens * width

    @cached_property
    def state(self) -> int:
        """Return the bytes of one hidden-state tensor, ``x``."""
        return self.elements(self.shape.hidden)

    @cached_property
    def scores(self) -> int:
        """Return the bytes of one materialised score matrix of all heads; 0 if the kernel never writes scores."""
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
        """Return the bytes of queries, keys, values and the attention output."""
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
        """Return True if the activation is made of several operators."""
        return self.shape.family is Family.GPT2 and not self.work.fused

    def norm_pieces(self, width: int) -> int:
        """Return the bytes that a norm over that width keeps if it is made of several operators."""
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
        """Return the bytes in which gradients of that many elements arrive."""
        return self.work.precision_bytes * numel if self.work.gradient_buffers else 0

    @cached_property
    def head_kept(self) -> int:
        """Return the bytes that the head keeps besides logits, its input included."""
        return (4 if self.shape.post_norm else 2) * self.state + self.norm_pieces(self.shape.hidden)

    @cached_property
    def tiled_head(self) -> TiledHead | None:
        """Return the head in tiles; None if the head is whole, or all logits are there at once."""
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
        """Return the bytes of the head's forward; a loss in chunks makes gradients there, and may need backward's
        bytes.
        """
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
        """Return the bytes of the gradients of logits and of the head's matrix; several chunks' sum is in fp32."""
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

    @property
    def norm_launches(self) -> int:
        """Return the operators of a norm: one, or the pieces of one in fp32."""
        return 1 if self.work.fused or self.shape.norm is Norm.LAYER else 8

    @cached_property
    def attention_launches(self) -> int:
        """Return the operators of attention: norms, projections, rotation, attention, and the sum with the residual."""
        shape = self.shape
        projections = 2 if shape.family is Family.GPT2 else 4
        rotation = 0 if shape.learned_positions else 10
        return (3 if shape.qk_norm else 1) * self.norm_launches + projections + rotation + 2

    @cached_property
    def mlp_launches(self) -> int:
        """Return the operators of the MLP: norm, products, activation, and the sum with the residual."""
        return self.norm_launches + (5 if self.shape.gated_mlp else 3) + (9 if self.composed_activation else 1)

    @property
    def loss_launches(self) -> int:
        """Return the operators of head and loss, forward; in chunks, for each."""
        return 8 * -(-self.work.tokens // self.loss_rows)
