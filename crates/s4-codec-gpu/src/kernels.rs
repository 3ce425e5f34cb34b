//! x
use crate::error::Result;
#[derive(Debug)]
pub struct Kernels;
impl Kernels { pub(crate) fn load(_d: u32) -> Result<Self> { Ok(Self) } pub(crate) fn unload(self) {} }
