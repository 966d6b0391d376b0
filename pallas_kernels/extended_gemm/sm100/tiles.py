"""Sizes that the instruction and its operands are cut into."""

OUTPUTS = 128
COLUMNS = 256
ATOM_COLUMNS = 64
ATOMS = COLUMNS // ATOM_COLUMNS
ATOM_LANES = 32
ATOM_SCALES = 16
