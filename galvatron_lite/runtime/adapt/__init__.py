"""Adapting while training: what is measured beside what was predicted, a corrected profile, and plans made anew."""
