"""Files that may be damaged, or from somebody else: what is checked before they are used."""
