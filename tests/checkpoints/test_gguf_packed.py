"""E2M1 weights of GGUF files against the gguf package's own decoding."""

import gguf
import numpy as np
import pytest

from autoematic_jax import formats
from autoematic_jax.checkpoints import gguf_packed
from autoematic_jax.checkpoints import open_source

Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
Types = gguf.GGMLQuantizationType


@pytest.fixture
def weights(hf_folder):
  """Of the tiny model with a width of 64, which blocks of NVFP4 divide."""
  source = open_source(hf_folder())
  rng = np.random.default_rng(0)

  def widened(name):
    shape = [64 if n == 60 else n for n in source.shape(name)]
    if "q_proj" in name:
      shape[0] = 60  # heads times head_dim
    if "o_proj" in name:
      shape[1] = 60
    return rng.normal(size=shape, scale=0.05).astype(np.float32)

  return {name: widened(name) for name in sorted(source.names)}


@pytest.fixture
def random_nvfp4(monkeypatch):
  """Blocks that the package can read but not make."""

  def blocks(values):
    rng = np.random.default_rng(1)
    scales = rng.integers(1, 0x7F, (len(values), 4), dtype=np.uint8)
    codes = rng.integers(0, 256, (len(values), 32), dtype=np.uint8)
    return np.concatenate([scales, codes], axis=1)

  monkeypatch.setattr(gguf.quants.NVFP4, "quantize_blocks", blocks)


@pytest.mark.usefixtures("random_nvfp4")
@pytest.mark.parametrize("kind", [Types.NVFP4, Types.MXFP4])
def test_packed_weights_decode_as_the_gguf_package_does(
  gguf_file, weights, kind
):
  path = gguf_file(
    weights,
    types={Q: kind, GATE: kind},
    metadata={"llama.embedding_length": 64},
    extra={"blk.0.attn_q.scale": np.array([0.25], np.float32)},
  )
  source = open_source(path)
  for name in (Q, GATE):
    tensor = source.packed(name)
    formats.validate_qtensor(tensor)
    np.testing.assert_array_equal(formats.dequantize(tensor), source.read(name))
  scale = source.packed(Q).tensor_scale
  assert kind is Types.MXFP4 or scale == 0.25
  assert source.packed("model.layers.0.self_attn.k_proj.weight") is None


def test_exponents_too_far_apart_for_e4m3_are_not_packed():
  blocks = np.full((1, 2, 17), 0x11, np.uint8)
  blocks[0, :, 0] = [100, 117]
  stored = blocks.reshape(1, -1)
  _, scales, tensor_scale = gguf_packed.mxfp4_parts(stored, 1.0)
  decoded = scales.astype(np.float64) * tensor_scale
  np.testing.assert_array_equal(
    decoded[0], 2.0 ** np.array([-27] * 2 + [-10] * 2)
  )
  blocks[0, 1, 0] = 118
  assert gguf_packed.mxfp4_parts(blocks.reshape(1, -1), 1.0) is None
