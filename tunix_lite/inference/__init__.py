"""A model outside of training: loaded from a run or a folder, asked, scored and exported."""
