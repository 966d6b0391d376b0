import json
import re
import shutil

import numpy as np
import pytest

from autoematic_jax.checkpoints import convert
from autoematic_jax.checkpoints import layout
from autoematic_jax.checkpoints import load_checkpoint
from autoematic_jax.checkpoints import orbax_io
from autoematic_jax.errors import AutoematicError
from autoematic_jax.errors import CheckpointError
from autoematic_jax.errors import QTensorError

NORM = "input_layernorm.weight"
DOWN = "mlp.down_proj.weight"


def rewrite_layer(path, edit):
  """Stores the first layer again after `edit` changed its arrays."""
  tensors = load_checkpoint(path).layer(0)
  arrays = {name: layout.arrays_of(t) for name, t in tensors.items()}
  edit(arrays)
  item = path / "weights" / layout.layer_item(0)
  shutil.rmtree(item)
  orbax_io.save_item(item, arrays)
  size = layout.directory_bytes(item)
  rewrite_metadata(path, lambda m: m["items"].update({item.name: size}))


def rewrite_metadata(path, edit):
  file = path / "autoematic.json"
  metadata = json.loads(file.read_text())
  edit(metadata)
  file.write_text(json.dumps(metadata))


def test_tensors_come_one_layer_at_a_time(checkpoint_path):
  checkpoint = load_checkpoint(checkpoint_path)
  names = [name for name, _ in checkpoint.tensors()]
  assert names == [
    *checkpoint.rest(),
    *(f"model.layers.0.{name}" for name in checkpoint.layer(0)),
    *(f"model.layers.1.{name}" for name in checkpoint.layer(1)),
  ]
  assert names == list(checkpoint.metadata["tensors"])


@pytest.mark.parametrize("field", ["codes", "group_scale", "tensor_scale"])
def test_an_altered_dtype_is_named(checkpoint_path, field):
  """Which Orbax alone would cast to what is asked for."""

  def edit(arrays):
    arrays[DOWN][field] = arrays[DOWN][field].astype(np.float16)

  rewrite_layer(checkpoint_path, edit)
  message = rf"mlp\.down_proj\.weight/{field} is stored as float16"
  with pytest.raises(CheckpointError, match=message):
    load_checkpoint(checkpoint_path).layer(0)
  load_checkpoint(checkpoint_path).layer(1)


def test_an_altered_dense_dtype_is_named(checkpoint_path):
  def edit(arrays):
    arrays[NORM]["values"] = arrays[NORM]["values"].astype(np.float32)

  rewrite_layer(checkpoint_path, edit)
  message = r"values is stored as float32\[60\]; the metadata says bfloat16"
  with pytest.raises(CheckpointError, match=message):
    load_checkpoint(checkpoint_path).layer(0)


def test_an_altered_shape_is_named(checkpoint_path):
  def edit(arrays):
    arrays[DOWN]["codes"] = arrays[DOWN]["codes"][:, :-8]

  rewrite_layer(checkpoint_path, edit)
  with pytest.raises(CheckpointError, match=r"codes is stored as.*224\]"):
    load_checkpoint(checkpoint_path).layer(0)


def test_missing_and_additional_arrays_are_named(checkpoint_path):
  rewrite_layer(checkpoint_path, lambda arrays: arrays[DOWN].pop("offsets"))
  with pytest.raises(CheckpointError, match=r"down_proj.*'offsets'"):
    load_checkpoint(checkpoint_path).layer(0)


def test_a_missing_tensor_is_named(checkpoint_path):
  rewrite_layer(checkpoint_path, lambda arrays: arrays.pop(DOWN))
  with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight"):
    load_checkpoint(checkpoint_path).layer(0)


def test_values_that_break_the_invariant_are_named(checkpoint_path):
  def edit(arrays):
    arrays[DOWN]["group_scale"] = arrays[DOWN]["group_scale"].copy()
    arrays[DOWN]["group_scale"][3, 1] = np.nan

  rewrite_layer(checkpoint_path, edit)
  message = r"model\.layers\.0\.mlp\.down_proj\.weight: group_scale has 1 "
  with pytest.raises(QTensorError, match=message):
    load_checkpoint(checkpoint_path).layer(0)


def test_a_missing_item_is_named(checkpoint_path):
  shutil.rmtree(checkpoint_path / "weights" / layout.layer_item(1))
  checkpoint = load_checkpoint(checkpoint_path)
  with pytest.raises(CheckpointError, match="layer_00001 is missing"):
    checkpoint.layer(1)


def test_truncated_weights_are_refused(checkpoint_path):
  item = checkpoint_path / "weights" / layout.layer_item(0)
  largest = max(item.rglob("d/*"), key=lambda file: file.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:-1])
  with pytest.raises(CheckpointError, match="layer_00000.*truncated"):
    load_checkpoint(checkpoint_path).layer(0)


def test_a_lost_file_is_refused(checkpoint_path):
  item = checkpoint_path / "weights" / layout.layer_item(0)
  (item / "_METADATA").unlink()
  with pytest.raises(CheckpointError, match="layer_00000.*truncated"):
    load_checkpoint(checkpoint_path).layer(0)


@pytest.mark.parametrize(
  ("version", "todo"),
  [(2, "upgrade autoematic_jax"), (0, "convert"), (None, "convert")],
)
def test_another_version_is_refused(checkpoint_path, version, todo):
  def edit(metadata):
    metadata["format_version"] = version
    metadata["tensors"] = "who knows"

  rewrite_metadata(checkpoint_path, edit)
  with pytest.raises(
    CheckpointError, match=f"format_version {version}.*{todo}"
  ):
    load_checkpoint(checkpoint_path)


def test_other_paths_are_refused(tmp_path, hf_folder):
  with pytest.raises(CheckpointError, match="does not exist"):
    load_checkpoint(tmp_path / "nowhere")
  with pytest.raises(CheckpointError, match="run autoematic convert on it"):
    load_checkpoint(hf_folder())
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match=r"no autoematic\.json$"):
    load_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\xff"])
def test_metadata_that_is_no_metadata_is_refused(checkpoint_path, content):
  file = checkpoint_path / "autoematic.json"
  file.write_text(content, encoding="latin-1")
  with pytest.raises(CheckpointError, match=re.escape(str(file))):
    load_checkpoint(checkpoint_path)


@pytest.mark.parametrize(
  "key",
  ["format", "decoding", "levels", "model", "tensors", "items", "stored_bits"],
)
@pytest.mark.parametrize("value", ["missing", None, "other", [99], 7])
def test_damaged_metadata_is_refused(checkpoint_path, key, value):
  def edit(metadata):
    if value == "missing":
      del metadata[key]
    else:
      metadata[key] = value

  rewrite_metadata(checkpoint_path, edit)
  if (key, value) == ("stored_bits", 7):
    assert load_checkpoint(checkpoint_path).stored_bits == 7
    return
  with pytest.raises(AutoematicError):
    load_checkpoint(checkpoint_path)


@pytest.mark.parametrize("change", ["kind", "columns", "format", "arrays"])
def test_a_damaged_entry_is_named(checkpoint_path, change):
  name = f"model.layers.1.{DOWN}"

  def edit(metadata):
    entry = metadata["tensors"][name]
    entry[change] = {"columns": 463, "arrays": {}}.get(change, "dense")

  rewrite_metadata(checkpoint_path, edit)
  with pytest.raises(CheckpointError, match=r"autoematic\.json"):
    load_checkpoint(checkpoint_path)


def test_a_config_of_another_shape_is_refused(checkpoint_path):
  def edit(metadata):
    metadata["model"]["intermediate_size"] = 480

  rewrite_metadata(checkpoint_path, edit)
  with pytest.raises(CheckpointError, match=r"464.*the model needs.*480"):
    load_checkpoint(checkpoint_path)


def test_a_moved_checkpoint_loads(checkpoint_path, tmp_path):
  moved = tmp_path / "elsewhere" / "renamed"
  shutil.copytree(checkpoint_path, moved)
  shutil.rmtree(checkpoint_path)
  assert len(dict(load_checkpoint(moved).tensors())) == 20


def test_a_relative_path_works(hf_folder, tmp_path, monkeypatch):
  folder = hf_folder()
  monkeypatch.chdir(tmp_path)
  convert(folder.name, "out", format="nvfp4")
  assert load_checkpoint("out").rest()
