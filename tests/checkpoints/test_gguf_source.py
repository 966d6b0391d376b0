import contextlib
import sys

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from autoematic_jax.checkpoints import open_source
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import UnsupportedModelError
from autoematic_jax.models import registry
from autoematic_jax.models.config import RopeScaling

DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
HEAD_DIM = 10

KINDS = gguf.GGMLQuantizationType


@pytest.fixture
def weights(hf_folder):
  source = open_source(hf_folder())
  return {name: np.array(source.read(name)) for name in source.names}


def test_names_shapes_and_row_order_are_those_of_hugging_face(
  gguf_file, weights
):
  source = open_source(gguf_file(weights))
  assert source.names == set(weights)
  for name, values in weights.items():
    assert source.shape(name) == values.shape
    np.testing.assert_array_equal(source.read(name), values, err_msg=name)


def test_the_config_is_that_of_the_same_hugging_face_folder(
  gguf_file, hf_folder
):
  configs = [
    registry.config_from_hf(open_source(path).config)
    for path in (gguf_file(), hf_folder(name="other"))
  ]
  assert configs[0].rms_norm_eps == pytest.approx(configs[1].rms_norm_eps)
  ours = configs[0].to_dict() | {"rms_norm_eps": configs[1].rms_norm_eps}
  assert ours == configs[1].to_dict()


def test_an_output_tensor_unties_the_head(gguf_file, weights):
  head = weights["model.embed_tokens.weight"] + 1
  source = open_source(gguf_file({**weights, "lm_head.weight": head}))
  assert source.config["tie_word_embeddings"] is False
  np.testing.assert_array_equal(source.read("lm_head.weight"), head)


def test_biases_of_queries_and_keys_are_reordered_too(gguf_file, weights):
  rng = np.random.default_rng(2)
  biases = {
    name.replace(".weight", ".bias"): rng.normal(size=w.shape[0])
    for name, w in weights.items()
    if "self_attn" in name
  }
  biases = {name: b.astype(np.float32) for name, b in biases.items()}
  source = open_source(gguf_file(weights | biases))
  assert source.config["attention_bias"] is True
  assert source.config["mlp_bias"] is False
  for name, values in biases.items():
    np.testing.assert_array_equal(source.read(name), values, err_msg=name)


@pytest.mark.parametrize(
  ("kind", "error"),
  [
    (KINDS.F16, 2.0**-10),
    (KINDS.BF16, 2.0**-8),
    (KINDS.Q8_0, 0.01),
    (KINDS.Q4_1, 0.1),
  ],
)
def test_quantized_types_are_dequantized(gguf_file, weights, kind, error):
  """Blocks of 32 columns: a projection of 480 columns has them."""
  rng = np.random.default_rng(3)
  values = rng.normal(size=(60, 480)).astype(np.float32)
  source = open_source(gguf_file({**weights, DOWN: values}, types={DOWN: kind}))
  read = source.read(DOWN)
  assert read.dtype == np.float32
  assert np.abs(read - values).max() <= error * np.abs(values).max()


def test_a_type_that_cannot_be_dequantized_is_named(
  gguf_file, weights, monkeypatch
):
  def refuse(data, kind):
    raise NotImplementedError(kind)

  source = open_source(gguf_file(weights))
  monkeypatch.setattr(gguf.quants, "dequantize", refuse)
  with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight.*F32"):
    source.read(DOWN)


def llama3_divisors(factor, theta=10000.0):
  wavelength = 2 * np.pi * theta ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
  divisors = []
  for length in wavelength:
    if length < 8192 / 4:
      divisors.append(1.0)
    elif length > 8192 / 1:
      divisors.append(factor)
    else:
      smooth = (8192 / length - 1) / (4 - 1)
      divisors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(divisors, np.float32)


def test_the_rope_scaling_of_llama_3_is_recognized(gguf_file):
  theta = 500000.0
  path = gguf_file(
    extra={"rope_freqs.weight": llama3_divisors(8.0, theta)},
    metadata={"llama.rope.freq_base": theta},
  )
  config = registry.config_from_hf(open_source(path).config)
  assert config.rope_scaling == RopeScaling(kind="llama3", factor=8.0)


def test_other_stored_rope_frequencies_are_refused(gguf_file):
  divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
  path = gguf_file(extra={"rope_freqs.weight": divisors})
  with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
    open_source(path)


def test_linear_rope_scaling_is_read(gguf_file):
  path = gguf_file(
    metadata={
      "llama.rope.scaling.type": "linear",
      "llama.rope.scaling.factor": 4.0,
    }
  )
  config = registry.config_from_hf(open_source(path).config)
  assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize(
  ("key", "value"),
  [
    ("llama.rope.scaling.type", "yarn"),
    ("llama.rope.dimension_count", 4),
    ("llama.attention.value_length", 20),
    ("llama.expert_count", 8),
    ("llama.attention.clamp_kqv", 8.0),
    ("llama.attention.head_count_kv", [2, 3]),
  ],
)
def test_metadata_that_is_not_handled_is_named(gguf_file, key, value):
  path = gguf_file(metadata={key: value})
  with pytest.raises(UnsupportedModelError, match=key):
    open_source(path)


def test_other_models_are_refused(gguf_file):
  with pytest.raises(UnsupportedModelError, match="'gemma3'"):
    open_source(gguf_file(architecture="gemma3", name="other.gguf"))
  extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}
  with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_gate_inp"):
    open_source(gguf_file(extra=extra))
  with pytest.raises(UnsupportedModelError, match="3 parts"):
    open_source(gguf_file(metadata={"split.count": 3}, name="part.gguf"))


def test_missing_metadata_is_named(gguf_file):
  path = gguf_file(metadata={"llama.block_count": None})
  with pytest.raises(CheckpointError, match=r"llama\.block_count"):
    open_source(path)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(
  max_examples=25,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_file_cut_anywhere_is_refused(tmp_path, gguf_file, share):
  whole = tmp_path / "tiny.gguf"
  content = (whole if whole.exists() else gguf_file()).read_bytes()
  cut = tmp_path / "cut.gguf"
  cut.write_bytes(content[: int(share * (len(content) - 64))])
  with pytest.raises(CheckpointError, match="truncated|neither a GGUF"):
    open_source(cut)


@given(position=st.integers(0, 4000), byte=st.integers(0, 255))
@settings(
  max_examples=25,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_changed_byte_is_read_or_refused(tmp_path, gguf_file, position, byte):
  whole = tmp_path / "tiny.gguf"
  content = bytearray((whole if whole.exists() else gguf_file()).read_bytes())
  content[position] = byte
  changed = tmp_path / "changed.gguf"
  changed.write_bytes(content)
  with contextlib.suppress(AutoematicError):
    source = open_source(changed)
    source.tokenizer_files()
    registry.config_from_hf(source.config)


def test_without_the_gguf_package_the_extra_is_named(gguf_file, monkeypatch):
  path = gguf_file()
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(CheckpointError, match=r"autoematic_jax\[gguf\]"):
    open_source(path)
