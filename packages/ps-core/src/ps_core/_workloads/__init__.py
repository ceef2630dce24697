"""What is trained: shapes with names, traces computed from them, Hugging Face configurations."""
