"""GEMM for Hopper: 4-bit weights decoded in registers.

`launch.decode_gemm` is the entry for few rows, `tiles.py` says how a GEMM is
cut. Two kernels share the decoding (`decode.py`) and the sums (`sums.py`):
`stream.py` multiplies up to 16 rows, and rows at mixed levels, by `mma.sync`;
`wgmma.py` multiplies up to 64 rows at one level by `wgmma`. For many rows
`unpack.py` decodes a layer once. `quantize.py` makes rows of x in the order in
which all of them read it. docs/kernels.md has what was measured.
"""
