"""What every room uses: types, errors, addresses, digests, and checks of files of strangers."""
