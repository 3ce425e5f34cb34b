//! The kernels in the vector instructions of x86-64.

use s4_format::Result;

use crate::{Width, token};

pub(crate) mod avx2;
pub(crate) mod avx512;
mod fold;

/// [`token::split`] with the shifts and masks of BMI2.
#[target_feature(enable = "avx2,bmi2")]
pub(crate) fn split_token(width: Width, src: &[u8], tokens: &mut [u8], bits: &mut [u8]) -> usize {
    token::split(width, src, tokens, bits)
}

/// [`token::merge`] with the shifts and masks of BMI2.
#[target_feature(enable = "avx2,bmi2")]
pub(crate) fn merge_token(width: Width, tokens: &[u8], bits: &[u8], dst: &mut [u8]) -> Result<()> {
    token::merge(width, tokens, bits, dst)
}
