import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import open_source
from autoematic_jax.errors import CheckpointError

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def weights():
  rng = np.random.default_rng(1)
  return {
    EMBEDDING: rng.normal(size=(7, 5)).astype(np.float32),
    NORM: rng.normal(size=(5,)).astype(np.float32),
  }


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_reads_each_float_dtype_exactly(hf_folder, weights, dtype):
  source = open_source(hf_folder(weights, dtype=dtype))
  assert source.names == set(weights)
  for name, values in weights.items():
    read = source.read(name)
    assert read.dtype == source.dtype(name)
    assert source.shape(name) == values.shape
    np.testing.assert_array_equal(read, values.astype(read.dtype))


def test_reads_what_the_safetensors_library_writes(hf_folder, weights):
  folder = hf_folder(weights)
  safetensors.numpy.save_file(weights, folder / "model.safetensors")
  source = open_source(folder)
  for name, values in weights.items():
    np.testing.assert_array_equal(source.read(name), values)


def test_reads_shards_by_the_index_only(hf_folder, weights):
  folder = hf_folder(weights, shards=2)
  stray = {NORM: np.full(5, np.nan, np.float32), "other": np.zeros(3)}
  safetensors.numpy.save_file(stray, folder / "consolidated.safetensors")
  source = open_source(folder)
  assert source.names == set(weights)
  np.testing.assert_array_equal(source.read(NORM), weights[NORM])


def test_a_copy_in_another_shard_is_ignored(hf_folder, weights):
  folder = hf_folder(weights, shards=2)
  index = json.loads((folder / "model.safetensors.index.json").read_text())
  other = next(f for n, f in index["weight_map"].items() if n != NORM)
  copies = {**weights, NORM: np.zeros(5, np.float32)}
  safetensors.numpy.save_file(copies, folder / other)
  np.testing.assert_array_equal(open_source(folder).read(NORM), weights[NORM])


def test_a_missing_shard_is_named(hf_folder, weights):
  folder = hf_folder(weights, shards=2)
  (folder / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(CheckpointError, match="00002-of-00002.*missing.*index"):
    open_source(folder)


def test_an_index_that_misplaces_a_tensor_is_refused(hf_folder, weights):
  folder = hf_folder(weights, shards=2)
  file = folder / "model.safetensors.index.json"
  index = json.loads(file.read_text())
  index["weight_map"]["gone.weight"] = index["weight_map"][NORM]
  file.write_text(json.dumps(index))
  with pytest.raises(CheckpointError, match=r"gone\.weight"):
    open_source(folder)


@given(share=st.floats(0, 1, exclude_max=True))
@settings(
  max_examples=30,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_file_cut_anywhere_is_refused(tmp_path, share):
  folder = tmp_path / "cut"
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text("{}")
  file = folder / "model.safetensors"
  safetensors.numpy.save_file({"a": np.ones(9), "b": np.ones((3, 4))}, file)
  whole = file.read_bytes()
  file.write_bytes(whole[: int(share * len(whole))])
  with pytest.raises(CheckpointError, match="truncated"):
    open_source(folder)


@pytest.mark.parametrize(
  "header",
  [
    b"not json",
    b"[]",
    b'{"a": 1}',
    b'{"a": {"dtype": "F32"}}',
    b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
  ],
)
def test_a_damaged_header_is_refused(hf_folder, header):
  folder = hf_folder()
  content = struct.pack("<Q", len(header)) + header + bytes(8)
  (folder / "model.safetensors").write_bytes(content)
  with pytest.raises(CheckpointError, match="model.safetensors"):
    open_source(folder)


def test_eight_bit_weights_are_refused_by_name(hf_folder, tmp_path):
  folder = hf_folder(dtype="F8_E4M3")
  with pytest.raises(CheckpointError, match=r"weight in .* F8_E4M3"):
    convert(folder, tmp_path / "out")


def test_a_quantized_folder_of_another_method_is_refused(hf_folder):
  folder = hf_folder(quantization_config={"quant_method": "awq"})
  with pytest.raises(CheckpointError, match="'awq'"):
    open_source(folder)


def test_shards_that_the_index_does_not_name_are_refused(hf_folder, weights):
  folder = hf_folder(weights, shards=2)
  safetensors.numpy.save_file(weights, folder / "model.safetensors")
  with pytest.raises(CheckpointError, match=r"does not name: model\.safe"):
    open_source(folder)


def test_a_null_quantization_config_is_none(hf_folder):
  assert open_source(hf_folder(quantization_config=None)).names


@pytest.mark.parametrize("removed", ["config.json", "model.safetensors"])
def test_a_folder_without_a_needed_file_is_refused(hf_folder, removed):
  folder = hf_folder()
  (folder / removed).unlink()
  with pytest.raises(CheckpointError, match=f"{removed} is missing"):
    open_source(folder)


def test_a_path_that_is_no_model_is_refused(tmp_path):
  with pytest.raises(CheckpointError, match="does not exist"):
    open_source(tmp_path / "nowhere")
  (tmp_path / "text").write_text("hello")
  with pytest.raises(CheckpointError, match="neither a GGUF file nor"):
    open_source(tmp_path / "text")


def test_end_tokens_come_from_the_config_where_nothing_else_has_them(
  hf_folder,
):
  files = open_source(hf_folder(eos_token_id=[3, 5])).tokenizer_files()
  assert json.loads(files["generation_config.json"])["eos_token_id"] == [3, 5]


def test_tokenizer_files_are_taken_along(hf_folder):
  folder = hf_folder()
  (folder / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
  (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
  (folder / "pytorch_model.bin").write_bytes(b"not wanted")
  files = open_source(folder).tokenizer_files()
  assert files == {
    "tokenizer.json": '{"é": 1}'.encode(),
    "generation_config.json": b'{"eos_token_id": 7}',
  }
