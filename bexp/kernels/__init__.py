"""Attention and expert-FFN back ends, each behind one registry."""
