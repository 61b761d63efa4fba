"""What to compute: sampling plans, credit assignment, losses. Torch, numpy and the standard library only."""
