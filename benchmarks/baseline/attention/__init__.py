"""Attention of the tables: `jax_triton`, decode without Pallas; importing the package registers it.

It would be the way out should Pallas lose its Triton lowering, of which JAX warns from 0.11 on.
"""

from benchmarks.baseline.attention import jax_triton
from ragjax.kernels.attention.op import BACKENDS, Backend

BACKENDS["jax_triton"] = Backend(jax_triton.attend, jax_triton.refusal)
