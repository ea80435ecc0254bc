"""What the other systems' own interpreters execute. Nothing here can be imported by ours: their libraries are not there."""
