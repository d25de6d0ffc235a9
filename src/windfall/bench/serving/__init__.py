"""`windfall bench serve`: a load test of any server with the OpenAI API."""
