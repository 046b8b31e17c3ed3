"""The engine side: MLX and token ids. Knows no Redis and no text; lives on one thread."""
