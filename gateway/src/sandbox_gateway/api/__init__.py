"""HTTP dialects: translate, authorise, nothing else. Every rule is the engine's."""
