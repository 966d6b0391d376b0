"""Short names for the sm_90a instructions that the kernels are made of."""

from collections.abc import Sequence

from autoematic_jax.pallas_kernels.sm90 import mlir
from autoematic_jax.pallas_kernels.sm90.mlir import Value
from autoematic_jax.pallas_kernels.sm90.mlir import asm
from autoematic_jax.pallas_kernels.sm90.mlir import asm_in_place
from autoematic_jax.pallas_kernels.sm90.mlir import const
from autoematic_jax.pallas_kernels.sm90.mlir import f32
from autoematic_jax.pallas_kernels.sm90.mlir import i32


def and_or(a: Value, b: int, c: int) -> Value:
  """`(a & b) | c` in one instruction, which ptxas would split."""
  return asm("lop3.b32 $0, $1, $2, $3, 0xea;", i32(), a, const(b), const(c))


def special(name: str) -> Value:
  """A special register such as `tid.x`."""
  return asm(f"mov.u32 $0, %{name};", i32())


def load_global(address: Value) -> Value:
  """4 bytes that no kernel writes meanwhile."""
  return asm("ld.global.nc.b32 $0, [$1];", i32(), address)


def load_global8(address: Value) -> Value:
  """A byte that no kernel writes meanwhile, zero-extended."""
  return asm("ld.global.nc.u8 $0, [$1];", i32(), address)


def load_global16(address: Value) -> Value:
  """2 bytes that no kernel writes meanwhile, zero-extended."""
  return asm("ld.global.nc.u16 $0, [$1];", i32(), address)


def load_global2(address: Value) -> tuple[Value, ...]:
  """8 bytes that no kernel writes meanwhile."""
  return asm("ld.global.nc.v2.b32 {$0, $1}, [$2];", [i32()] * 2, address)


def load_global4(address: Value) -> tuple[Value, ...]:
  """16 bytes that no kernel writes meanwhile."""
  return asm(
    "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
    [i32()] * 4,
    address,
  )


def store_global(address: Value, value: Value) -> None:
  """4 bytes to device memory."""
  asm("st.global.b32 [$0], $1;", None, address, value, volatile=True)


def store_global8(address: Value, value: Value) -> None:
  """The low byte to device memory."""
  asm(
    "{ .reg .b16 t; cvt.u16.u32 t, $1; st.global.u8 [$0], t; }",
    None,
    address,
    value,
    volatile=True,
  )


def store_global4_f32(address: Value, values: Sequence[Value]) -> None:
  """Four float32 to device memory."""
  asm(
    "st.global.v4.f32 [$0], {$1, $2, $3, $4};",
    None,
    address,
    *values,
    volatile=True,
  )


def store_global2(address: Value, values: Sequence[Value], at: int = 0) -> None:
  """8 bytes to device memory."""
  asm(
    f"st.global.v2.b32 [$0+{at}], {{$1, $2}};",
    None,
    address,
    *values,
    volatile=True,
  )


def store_global4(address: Value, values: Sequence[Value], at: int = 0) -> None:
  """16 bytes to device memory."""
  asm(
    f"st.global.v4.b32 [$0+{at}], {{$1, $2, $3, $4}};",
    None,
    address,
    *values,
    volatile=True,
  )


def load_global_f32(address: Value) -> Value:
  """A float32 that no kernel writes meanwhile."""
  return asm("ld.global.nc.f32 $0, [$1];", f32(), address)


def load_global4_f32(address: Value) -> tuple[Value, ...]:
  """Four float32 that no kernel writes meanwhile."""
  return asm(
    "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", [f32()] * 4, address
  )


def store_global_f32(address: Value, value: Value) -> None:
  """A float32 to device memory."""
  asm("st.global.f32 [$0], $1;", None, address, value, volatile=True)


def load_shared4(address: Value, at: int = 0) -> tuple[Value, ...]:
  """16 bytes of shared memory."""
  return asm(
    f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];",
    [i32()] * 4,
    address,
    volatile=True,
  )


def load_shared(address: Value, at: int = 0) -> Value:
  """4 bytes of shared memory."""
  return asm(f"ld.shared.b32 $0, [$1+{at}];", i32(), address, volatile=True)


def load_shared16(address: Value, at: int = 0) -> Value:
  """2 bytes of shared memory, zero-extended."""
  return asm(f"ld.shared.u16 $0, [$1+{at}];", i32(), address, volatile=True)


def load_shared_f32(address: Value, at: int = 0) -> Value:
  """A float32 of shared memory."""
  return asm(f"ld.shared.f32 $0, [$1+{at}];", f32(), address, volatile=True)


def load_shared4_f32(address: Value, at: int = 0) -> tuple[Value, ...]:
  """Four float32 of shared memory."""
  return asm(
    f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{at}];",
    [f32()] * 4,
    address,
    volatile=True,
  )


def load_peer4_f32(address: Value, at: int = 0) -> tuple[Value, ...]:
  """From shared memory of any block of the cluster."""
  return asm(
    f"ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [$4+{at}];",
    [f32()] * 4,
    address,
    volatile=True,
  )


def store_shared4_f32(
  address: Value, values: Sequence[Value], at: int = 0
) -> None:
  """Four float32 to shared memory."""
  asm(
    f"st.shared.v4.f32 [$0+{at}], {{$1, $2, $3, $4}};",
    None,
    address,
    *values,
    volatile=True,
  )


def peer_address(address: Value, rank: Value | int) -> Value:
  """Where a shared address lies in block `rank` of the cluster."""
  return asm(
    "mapa.shared::cluster.u32 $0, $1, $2;", i32(), address, mlir.as_value(rank)
  )


def block_barrier() -> None:
  """All threads of a block wait for each other."""
  asm("bar.sync 0;", None, volatile=True)


def warp_barrier() -> None:
  """All lanes of a warp wait for each other."""
  asm("bar.warp.sync 0xffffffff;", None, volatile=True)


def cluster_barrier() -> None:
  """All blocks of a cluster wait for each other."""
  asm("barrier.cluster.arrive.release.aligned;", None, volatile=True)
  asm("barrier.cluster.wait.acquire.aligned;", None, volatile=True)


def copy_async16(shared: Value, source: Value) -> None:
  """Starts to copy 16 bytes to shared memory."""
  asm(
    "cp.async.cg.shared.global [$0], [$1], 16;",
    None,
    shared,
    source,
    volatile=True,
  )


def copy_async16_sized(shared: Value, source: Value, size: Value) -> None:
  """16 bytes, zero past the first `size`."""
  asm(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
    None,
    shared,
    source,
    size,
    volatile=True,
  )


def barrier_arrive_copies(barrier: Value) -> None:
  """Arrives once this thread's `copy_async` so far have landed."""
  asm(
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];",
    None,
    barrier,
    volatile=True,
  )


def group_barrier(number: Value, threads: int) -> None:
  """Some warps of a block wait for each other; numbers from 1 to 15."""
  asm(f"bar.sync $0, {threads};", None, number, volatile=True)


def touch(address: Value) -> None:
  """Loads into the first cache what will be wanted later."""
  asm(
    "{ .reg .b32 t; ld.global.nc.b32 t, [$0]; }", None, address, volatile=True
  )


def barrier_init(barrier: Value, arrivals: int) -> None:
  """A phase ends with `arrivals` arrivals."""
  asm(
    f"mbarrier.init.shared::cta.b64 [$0], {arrivals};",
    None,
    barrier,
    volatile=True,
  )


def barrier_init_fence() -> None:
  """Makes initialized barriers visible to bulk copies."""
  asm("fence.mbarrier_init.release.cluster;", None, volatile=True)
  asm("fence.proxy.async.shared::cta;", None, volatile=True)


def barrier_expect(barrier: Value, size: Value) -> None:
  """Arrives, and lets the phase wait for `size` bytes as well."""
  asm(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    None,
    barrier,
    size,
    volatile=True,
  )


def barrier_wait(barrier: Value, parity: Value) -> None:
  """Waits for the end of the phase of this parity."""
  asm(
    "{ .reg .pred p;\n"
    "again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@!p bra again; }",
    None,
    barrier,
    parity,
    volatile=True,
  )


def copy_bulk(shared: Value, source: Value, size: Value, barrier: Value):
  """Device memory to shared memory by the copy engine, 16-byte multiples."""
  asm(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [$0], [$1], $2, [$3];",
    None,
    shared,
    source,
    size,
    barrier,
    volatile=True,
  )


def from_lane(value: Value, distance: int) -> Value:
  """The value of the lane whose number differs in the bit `distance`."""
  return asm(
    f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;",
    f32(),
    value,
    volatile=True,
  )


def ballot(condition: Value) -> Value:
  """A bit for each lane of the warp."""
  return asm(
    "vote.sync.ballot.b32 $0, $1, 0xffffffff;", i32(), condition, volatile=True
  )


def fma(a: Value, b: Value, c: Value) -> Value:
  """`a * b + c` of float32, rounded once."""
  return asm("fma.rn.f32 $0, $1, $2, $3;", f32(), a, b, c)


def rsqrt(x: Value) -> Value:
  """`1 / sqrt(x)`, within 2 ulp."""
  return asm("rsqrt.approx.f32 $0, $1;", f32(), x)


def exp2(x: Value) -> Value:
  """`2**x`, within 2 ulp."""
  return asm("ex2.approx.f32 $0, $1;", f32(), x)


def half2(low: Value, high: Value) -> Value:
  """Two float32 rounded to a float16 pair."""
  return asm("cvt.rn.f16x2.f32 $0, $1, $2;", i32(), high, low)


def half2_to_f32(pair: Value) -> tuple[Value, ...]:
  """Both float16 of a pair, exactly."""
  return asm(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2;"
    " cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    [f32()] * 2,
    pair,
  )


def transpose_8x8(pair: Value) -> Value:
  """Of a warp's 8 by 8 16-bit matrix, a lane's two columns of a row."""
  return asm(
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
    i32(),
    pair,
    volatile=True,
  )


def store_shared_f32(address: Value, value: Value) -> None:
  """A float32 to shared memory."""
  asm("st.shared.f32 [$0], $1;", None, address, value, volatile=True)


def permute(a: Value, b: Value | int, selector: int) -> Value:
  """Bytes of (a, b), 0 to 3 of a and 4 to 7 of b, by nibbles of selector."""
  return asm(f"prmt.b32 $0, $1, $2, {selector:#x};", i32(), a, mlir.as_value(b))


def mul_half2(a: Value, b: Value) -> Value:
  """Products of float16 pairs."""
  return asm("mul.rn.f16x2 $0, $1, $2;", i32(), a, b)


def add_half2(a: Value, b: Value) -> Value:
  """Sums of float16 pairs."""
  return asm("add.rn.f16x2 $0, $1, $2;", i32(), a, b)


def fma_half2(a: Value, b: Value, c: Value) -> Value:
  """`a * b + c` of float16 pairs, rounded once."""
  return asm("fma.rn.f16x2 $0, $1, $2, $3;", i32(), a, b, c)


def max_half2(a: Value, b: Value) -> Value:
  """The greater of float16 pairs."""
  return asm("max.f16x2 $0, $1, $2;", i32(), a, b)


def e4m3_to_half2(bytes_: Value) -> Value:
  """The two low bytes, decoded."""
  return asm(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.rn.f16x2.e4m3x2 $0, lo; }",
    i32(),
    bytes_,
  )


def mma_16x8x16(
  acc: Sequence[Value], a: Sequence[Value], b: Sequence[Value]
) -> tuple[Value, ...]:
  """`acc + a @ b` of one warp, float16 into float32."""
  return asm(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
    [f32()] * 4,
    *a,
    *b,
    *acc,
  )


def barrier_arrive(barrier: Value) -> None:
  """One arrival."""
  asm("mbarrier.arrive.shared::cta.b64 _, [$0];", None, barrier, volatile=True)


def wgmma_fence(words: Sequence[Value]) -> tuple[Value, ...]:
  """Before products; `words`, which they read, are computed before it."""
  return asm_in_place("wgmma.fence.sync.aligned;", words)


def wgmma_commit() -> None:
  """Makes a group of the products since the last one."""
  asm("wgmma.commit_group.sync.aligned;", None, volatile=True)


def wgmma_wait(groups: int) -> None:
  """Until at most the last `groups` groups run."""
  asm(f"wgmma.wait_group.sync.aligned {groups};", None, volatile=True)


def wgmma_finish(acc: Sequence[Value]) -> tuple[Value, ...]:
  """Waits for every group; the sums may be used after it."""
  return asm_in_place("wgmma.wait_group.sync.aligned 0;", acc)


def wgmma_64xn(
  acc: Sequence[Value], a: Sequence[Value], descriptor: Value
) -> tuple[Value, ...]:
  """`acc + a @ b` of a warpgroup, a in registers and b K-major in memory."""
  count = len(acc)
  sums = ", ".join(f"${n}" for n in range(count))
  left = ", ".join(f"${2 * count + n}" for n in range(4))
  return asm_in_place(
    "{ .reg .pred p; setp.eq.u32 p, 0, 0;"
    f" wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.f16.f16"
    f" {{{sums}}}, {{{left}}}, ${2 * count + 4}, p, 1, 1, 0; }}",
    acc,
    *a,
    descriptor,
  )


def swizzled_descriptor(address: Value) -> Value:
  """Of a K-major operand in rows of 128 bytes, swizzled by 8 rows."""
  low = mlir.and_(mlir.shr(address, 4), 0x3FFF)
  # Swizzle of 128 bytes, 1024 bytes from 8 rows to the next 8.
  return mlir.or_wide(low, (1 << 62) | (64 << 32) | (1 << 16))
