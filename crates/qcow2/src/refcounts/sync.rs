pub(crate) use crate::sync::*;
