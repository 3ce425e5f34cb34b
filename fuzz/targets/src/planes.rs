//! The kernels on values, for every set of vector instructions.

use s4_format::crc32c;
use s4_planes::{Kernels, Simd, Width, token_bound};

use crate::input::{Input, expand, sets};

const WIDTHS: [Width; 4] = [Width::B1, Width::B2, Width::B4, Width::B8];

/// One operation: all kernels give what plain Rust gives, and merging restores what was split.
pub fn planes(data: &[u8]) {
    let mut input = Input::new(data);
    let op = input.below(9);
    let floats = op < 2;
    let w = if floats { input.pick(&WIDTHS[1..]) } else { input.pick(&WIDTHS) };
    let n = input.len() % 20_000;
    let (a, b) = (input.u16(), input.u16());
    let rest = input.rest();
    let (left, right) = rest.split_at(rest.len().min(usize::from(a)));
    let values = expand(left, n * w.bytes());
    let other = expand(right, n * w.bytes());
    let run = |simd| {
        let k = Kernels::new(simd);
        match op {
            0 => fields(k, w, &values),
            1 => fields_sign(k, w, &values),
            2 => bytes(k, w, &values),
            3 => pair(&values, |v| k.xor(v, &other), |v| k.xor(v, &other)),
            4 => pair(&values, |v| k.to_ordered(w, v), |v| k.from_ordered(w, v)),
            5 => pair(&values, |v| k.sub_ordered(w, v, &other), |v| k.add_ordered(w, v, &other)),
            6 => pair(&values, |v| k.sub_values(w, v, &other), |v| k.add_values(w, v, &other)),
            7 => {
                let mut predicted = vec![0; other.len()];
                let cols = expand(right, 2 * n);
                let with = (u64::from(a), b as i16, u32::from(b) % w.bits());
                k.sums(w, with, &cols, &mut predicted);
                pair(
                    &values,
                    |v| k.sub_magnitudes(w, v, &predicted),
                    |v| k.add_magnitudes(w, v, &predicted),
                )
            }
            _ => token(k, w, &values, right, n),
        }
    };
    let expected = run(Simd::Scalar);
    for simd in sets() {
        assert!(run(simd) == expected, "{simd} differs");
    }
}

fn fields(k: Kernels, w: Width, values: &[u8]) -> Vec<u8> {
    let n = values.len() / w.bytes();
    let mut planes = vec![0; values.len()];
    let (e, rest) = planes.split_at_mut(n);
    let (a, b) = rest.split_at_mut(n);
    k.split_fields(w, values, e, a, b);
    let mut back = vec![0xa5; values.len()];
    k.merge_fields(w, e, a, b, &mut back);
    assert!(back == values);
    back.fill(0);
    let crc = k.merge_fields_crc(w, e, a, b, &mut back, 0);
    assert!(back == values && crc == crc32c(values));
    planes
}

fn fields_sign(k: Kernels, w: Width, values: &[u8]) -> Vec<u8> {
    let n = values.len() / w.bytes();
    let mut planes = vec![0; n.div_ceil(8) + values.len()];
    let (s, rest) = planes.split_at_mut(n.div_ceil(8));
    let (e, rest) = rest.split_at_mut(n);
    let (a, b) = rest.split_at_mut(n);
    k.split_fields_sign(w, values, s, e, a, b);
    let mut back = vec![0xa5; values.len()];
    k.merge_fields_sign(w, s, e, a, b, &mut back);
    assert!(back == values);
    // Bits that no split sets are ignored by all kernels.
    a.iter_mut().for_each(|a| *a |= 0x80);
    k.merge_fields_sign(w, s, e, a, b, &mut back);
    assert!(back == values);
    planes
}

fn bytes(k: Kernels, w: Width, values: &[u8]) -> Vec<u8> {
    let mut planes = vec![0; values.len()];
    k.split_bytes(w, values, &mut planes);
    let mut back = vec![0xa5; values.len()];
    k.merge_bytes(w, &planes, &mut back);
    assert!(back == values);
    planes
}

/// An operation and its inverse.
fn pair(values: &[u8], there: impl Fn(&mut [u8]), back: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut out = values.to_vec();
    there(&mut out);
    let mut again = out.clone();
    back(&mut again);
    assert!(again == values);
    out
}

/// Splits values into tokens, and merges tokens and bits that may be changed.
fn token(k: Kernels, w: Width, values: &[u8], wrong: &[u8], n: usize) -> Vec<u8> {
    let (mut tokens, mut bits) = (vec![0; n], vec![0; token_bound(w, n)]);
    let used = k.split_token(w, values, &mut tokens, &mut bits);
    let mut out = vec![0xa5; values.len()];
    assert_eq!(k.merge_token(w, &tokens, &bits[..used], &mut out), Ok(()));
    assert!(out == values);
    // Change a few tokens, and the number of bits.
    for change in wrong.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]]));
        if let Some(token) = tokens.get_mut(at) {
            *token = change[2];
        }
    }
    let len = (used + wrong.len()).saturating_sub(8).min(bits.len());
    match k.merge_token(w, &tokens, &bits[..len], &mut out) {
        Ok(()) => out.push(1),
        // The destination is untouched.
        Err(_) => assert!(out == values),
    }
    out.extend(tokens);
    out.extend(&bits[..used]);
    out
}
