"""What draft and verify passes cost on this machine, and how likely draft tokens are to be accepted."""
