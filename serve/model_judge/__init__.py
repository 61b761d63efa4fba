"""A language model as judge: what it is shown, how its answer is read, and what is kept of it."""
