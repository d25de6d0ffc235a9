"""Sample prompts, prompt files, and prompts from standard input."""
