//! Whether the module was built for the vhost of the kernel that runs.
use std::fmt;
/// Why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// x
    Differs(String),
}
impl fmt::Display for LayoutError {
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}
impl std::error::Error for LayoutError {}
/// Checks.
pub fn check() -> Result<(), LayoutError> {
    Err(LayoutError::Differs("not compared yet".to_owned()))
}
