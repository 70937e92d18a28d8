"""The words on the wire: .proto files and the code generated from them."""
