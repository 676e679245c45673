"""The engine `remote`: a model that another service serves, for policies that are never trained."""
