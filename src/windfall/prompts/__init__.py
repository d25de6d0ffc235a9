"""Sample prompts, and files of prompts."""
