"""Tasks with answers: where they come from, how they run and are scored."""
