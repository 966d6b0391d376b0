"""Nothing published speaks of the machine that it was written on."""

import re
from pathlib import Path

HOME_FOLDERS = re.compile(r"(?<![\w.\-/])/(?:home|root|Users|work|mnt)/\w")


def test_no_file_names_a_folder_of_somebodys_machine(root, tracked_files):
  named = {str(root) + "/", str(Path.home()) + "/"} - {"//"}
  found = []
  for file in tracked_files:
    # A file that is deleted and not yet committed is still listed.
    text = file.read_text(errors="ignore") if file.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
      if HOME_FOLDERS.search(line) or any(path in line for path in named):
        found.append(f"{file.relative_to(root)}:{number}: {line.strip()}")
  assert found == []
