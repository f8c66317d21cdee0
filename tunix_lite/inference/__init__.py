"""A model outside of training: loaded from a run or a folder, sampled, scored and exported."""
