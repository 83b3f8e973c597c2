"""HTTP: OpenAI's paths, shapes and status codes. Nothing here knows gRPC."""
