"""Network slots: namespaces, links and rules."""
