"""Compiles one product for a described H100 with results for it, and for one that is not there, and tells its tiles.

Run as a program: XLA reads results once a process.
"""

from __future__ import annotations

import re

from llmc.compiler.targets.cuda.target import COMPILER_OPTIONS, parse_topology
from llmc.compiler.targets.cuda.tuning import choosing, serialise
from llmc.runtime.executors.xla import wire
from llmc.runtime.executors.xla.client import open_client
from llmc.runtime.executors.xla.programs import mesh_of
from tests.compiler.targets.cuda.test_autotuning import H100

HLO = """{
  tmp_0 = bf16[512,1024]{1,0} parameter(0)
  tmp_1 = bf16[1024,2048]{1,0} parameter(1)
  ROOT tmp_2 = bf16[512,2048]{1,0} dot(bf16[512,1024]{1,0} tmp_0, bf16[1024,2048]{1,0} tmp_1), \
lhs_contracting_dims={1}, rhs_contracting_dims={0}, sharding={replicated}
}"""
"""How XLA of jax 0.10.2 writes this product in its keys."""

TRITON = 17
"""AutotuneResult.triton; its fields are block_m, block_n, block_k, split_k, num_stages, num_warps, num_ctas."""


def main() -> None:
    """Print it."""
    tiles = b"".join(wire.field(i, value) for i, value in enumerate((64, 128, 32, 1, 4, 8, 1), 1))
    results = serialise({HLO: wire.field(TRITON, tiles), HLO.replace("512", "256"): b""}, H100)
    with choosing(results, model=False) as (options, looked):
        open_client("cpu")
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        where = NamedSharding(mesh_of(parse_topology("h100").describe()), PartitionSpec())
        shapes = [jax.ShapeDtypeStruct(s, jax.numpy.bfloat16, sharding=where) for s in ((512, 1024), (1024, 2048))]
        traced = jax.jit(jax.numpy.matmul, out_shardings=where).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).compile({**COMPILER_OPTIONS, **options}).as_text()
    warps, tile = re.findall(r'"num_warps":"(\d+)","output_tiles":\[\{"sizes":\[([^]]*)\]', text)[0]
    print(f"{looked.tuned} of {looked.matmuls} tuned; tiles {tile}; {warps} warps")


if __name__ == "__main__":
    main()
