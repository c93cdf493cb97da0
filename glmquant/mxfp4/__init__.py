"""The numbers: MXFP4 as the OCP MX specification defines it and AMD Quark rounds it."""
