"""Commands for the files of a store: check, mend, read, copy. No daemon takes part in them."""
