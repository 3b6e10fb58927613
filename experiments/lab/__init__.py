"""The laboratory: what is run (`cells`), by whom (`methods`), where (`worlds`), how (`play`)."""
