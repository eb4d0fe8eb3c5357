"""Gated short convolutions in the place of self-attention, as in LFM2 (Liquid AI 2025).

A token is projected to a gate, a value and a gate of the output; the convolution reads the products
of gate and value of the last tokens of its sample, and of no other.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import ConvolutionConfig
from mmjax.kernels.token_paths import extend_paths
from mmjax.models.delta_context import convolve_over_context, shares_rows
from mmjax.models.kv_cache import ConvolutionState, KVCacheView
from mmjax.models.layers import Context
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.remat import keep_inputs
from mmjax.models.short_convolution import ChannelFilter, causal_convolution, last_inputs


class GatedConvolution(nnx.Module):
    """Projections, a short convolution between two gates, and a projection."""

    def __init__(self, config: ConvolutionConfig, width: int, rngs: nnx.Rngs):
        c = config
        into = partial(Linear, width, width, ("embed", "heads"), rngs, bias=c.biased)
        self.gate = into()
        self.output_gate = into()
        self.value = into()
        self.filter = ChannelFilter(c.taps, width, rngs)
        self.filter_bias = nnx.Param(jnp.zeros(width), axes=("heads",)) if c.biased else None
        self.output = Linear(width, width, ("heads", "embed"), rngs, bias=c.biased)
        self.taps = c.taps

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> tuple[Float[Array, "b t d"], ConvolutionState]:
        """Apply the layer to rows, or to tokens behind those of `past`; return the convolution's last inputs.

        With one sample in a row from its first column on, as in prefill and decode; of packed rows
        nobody reads them.
        """
        branched = context.path is not None
        path = context.path if branched else context.mask.sample
        gate, output_gate, value = apply_linears(x, self.gate, self.output_gate, self.value)
        values = gate * value
        weight = self.filter.weight[...]
        if past is None:
            previous = jnp.zeros((len(x), self.taps - 1, values.shape[-1]), values.dtype)
        else:
            previous = past.cache.inputs
        inputs = last_inputs(previous, values, jnp.sum(path >= 0, axis=1, dtype=jnp.int32))
        if past is None and shares_rows(x.shape[1]):
            convolved = convolve_over_context(values, weight, path, branched)
        else:
            convolved = keep_inputs(partial(causal_convolution, branched=branched))(
                values, weight, extend_paths(path), previous
            )

        # With the last product, whose operand is made again.
        @keep_inputs
        def output(convolved: Array, output_gate: Array) -> Array:
            if self.filter_bias is not None:
                convolved = convolved + self.filter_bias[...].astype(convolved.dtype)
            return self.output(output_gate * convolved)

        return output(convolved, output_gate), ConvolutionState(inputs)
