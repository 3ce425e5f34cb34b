//! One runner for every kernel: the same cases, for every set of instructions that this machine
//! has, against the scalar kernels.

use proptest::prelude::*;
use s4_planes::patterns::{self, Kind};
use s4_planes::{Kernels, Simd, Width};

const FIELDS: [Width; 3] = [Width::B2, Width::B4, Width::B8];
const INTEGERS: [Width; 4] = [Width::B1, Width::B2, Width::B4, Width::B8];

/// A buffer for a kernel's output, at an odd address and filled with a different byte each time, so
/// that bytes that the kernel does not write show.
struct Buffer {
    bytes: Vec<u8>,
    len: usize,
}

impl Buffer {
    fn new(len: usize, fill: u8) -> Self {
        Self { bytes: vec![fill; len + 2], len }
    }
    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[1..][..self.len]
    }
    /// The content, after a check that the bytes around it were left alone.
    fn take(self) -> Vec<u8> {
        let (first, last) = (self.bytes[0], self.bytes[self.len + 1]);
        assert_eq!(first, last, "a kernel wrote outside of its slice");
        self.bytes[1..][..self.len].to_vec()
    }
}

/// An operation and its inverse, on elements of one width.
struct Operation<'a> {
    name: &'static str,
    widths: &'a [Width],
    /// Sizes of the outputs for elements of a width and their number.
    outputs: fn(Width, usize) -> Vec<usize>,
    split: fn(Kernels, Width, &[u8], &mut [Buffer]),
    merge: fn(Kernels, Width, &[Vec<u8>], &mut [u8]),
}

fn slices<const N: usize>(outputs: &mut [Buffer]) -> [&mut [u8]; N] {
    let mut outputs = outputs.iter_mut();
    std::array::from_fn(|_| outputs.next().expect("an output for each plane").get())
}

/// The operand that differences are taken from: the bytes of `src` in reverse order, rotated.
fn other(src: &[u8]) -> Vec<u8> {
    src.iter().rev().map(|b| b.rotate_left(3)).collect()
}

/// For operations that keep the size, on a copy of the input.
macro_rules! in_place {
    ($name:literal, $widths:expr, $forth:expr, $back:expr) => {
        Operation {
            name: $name,
            widths: $widths,
            // The second output passes the other operand on to `merge`.
            outputs: |w, n| vec![n * w.bytes(); 2],
            split: |k, w, src, out| {
                let [buf, operand] = slices(out);
                buf.copy_from_slice(src);
                operand.copy_from_slice(&other(src));
                $forth(k, w, buf, &*operand);
            },
            merge: |k, w, planes, dst| {
                dst.copy_from_slice(&planes[0]);
                $back(k, w, dst, &planes[1]);
            },
        }
    };
}

fn operations() -> Vec<Operation<'static>> {
    vec![
        Operation {
            name: "fields",
            widths: &FIELDS,
            outputs: |w, n| vec![n, n, n * (w.bytes() - 2)],
            split: |k, w, src, out| {
                let [e, a, b] = slices(out);
                k.split_fields(w, src, e, a, b);
            },
            merge: |k, w, p, dst| k.merge_fields(w, &p[0], &p[1], &p[2], dst),
        },
        Operation {
            name: "fields-sign",
            widths: &FIELDS,
            outputs: |w, n| vec![n.div_ceil(8), n, n, n * (w.bytes() - 2)],
            split: |k, w, src, out| {
                let [s, e, a, b] = slices(out);
                k.split_fields_sign(w, src, s, e, a, b);
            },
            merge: |k, w, p, dst| k.merge_fields_sign(w, &p[0], &p[1], &p[2], &p[3], dst),
        },
        Operation {
            name: "bytes",
            widths: &Width::ALL,
            outputs: |w, n| vec![n * w.bytes()],
            split: |k, w, src, out| k.split_bytes(w, src, out[0].get()),
            merge: |k, w, p, dst| k.merge_bytes(w, &p[0], dst),
        },
        in_place!(
            "xor",
            &Width::ALL,
            |k: Kernels, _, buf: &mut _, y: &_| k.xor(buf, y),
            |k: Kernels, _, buf: &mut _, y: &_| k.xor(buf, y)
        ),
        in_place!(
            "ordered",
            &INTEGERS,
            |k: Kernels, w, buf: &mut _, _| k.to_ordered(w, buf),
            |k: Kernels, w, buf: &mut _, _| k.from_ordered(w, buf)
        ),
        in_place!("sub_ordered", &INTEGERS, Kernels::sub_ordered, Kernels::add_ordered),
        in_place!("sub_values", &INTEGERS, Kernels::sub_values, Kernels::add_values),
        in_place!("sub_magnitudes", &INTEGERS, Kernels::sub_magnitudes, Kernels::add_magnitudes),
    ]
}

/// Checks that every set of instructions splits as the scalar kernels do, and merges back.
fn check(operation: &Operation<'_>, width: Width, src: &[u8], case: &str) {
    let n = src.len() / width.bytes();
    let split = |simd: Simd, fill: u8| -> Vec<Vec<u8>> {
        let sizes = (operation.outputs)(width, n);
        let mut out: Vec<_> = sizes.into_iter().map(|size| Buffer::new(size, fill)).collect();
        (operation.split)(Kernels::new(simd), width, src, &mut out);
        out.into_iter().map(Buffer::take).collect()
    };
    let expected = split(Simd::Scalar, 0);
    for simd in Simd::available() {
        let name = operation.name;
        assert!(split(simd, 0xa5) == expected, "{name} {width:?} {simd} {case}: split");
        let mut dst = Buffer::new(src.len(), 0x5a);
        (operation.merge)(Kernels::new(simd), width, &expected, dst.get());
        assert!(dst.take() == src, "{name} {width:?} {simd} {case}: merge");
    }
}

fn kinds(width: Width) -> impl Iterator<Item = Kind> {
    let floats = Kind::FLOATS.into_iter().filter(move |k| k.width == width);
    floats.chain([Kind::int(width)])
}

#[test]
fn every_pattern_at_every_size() {
    for operation in operations() {
        for width in operation.widths {
            for kind in kinds(*width) {
                for (name, bytes) in patterns::all(kind, 300) {
                    for n in 0..=300 {
                        let src = &bytes[..n * width.bytes()];
                        check(&operation, *width, src, &format!("{name} of {n}"));
                    }
                }
            }
        }
    }
}

#[test]
fn sources_and_planes_at_every_alignment() {
    for operation in operations() {
        for width in operation.widths {
            let (_, bytes) = patterns::all(Kind::int(*width), 1100).last().unwrap();
            for offset in 0..64 {
                let len = 1000 * width.bytes();
                check(&operation, *width, &bytes[offset..][..len], &format!("offset {offset}"));
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..6000)) {
        for operation in operations() {
            for width in operation.widths {
                let n = bytes.len() / width.bytes();
                check(&operation, *width, &bytes[..n * width.bytes()], "random");
            }
        }
    }
}

/// Bit `i` of a little-endian buffer.
fn bit(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 8] >> (i % 8) & 1
}

/// The definitions of the layouts, bit by bit, against the scalar kernels.
#[test]
fn planes_hold_the_bits_that_the_layouts_say() {
    let kernels = Kernels::new(Simd::Scalar);
    for width in FIELDS {
        let (bits, low) = (8 * width.bytes(), 8 * (width.bytes() - 2));
        let (_, src) = patterns::all(Kind::int(width), 67).last().unwrap();
        let (mut s, mut e, mut a) = (vec![0; 9], vec![0; 67], vec![0; 67]);
        let mut b = vec![0; 67 * (width.bytes() - 2)];

        kernels.split_fields(width, &src, &mut e, &mut a, &mut b);
        for i in 0..67 {
            // Bit j of the rotated element is bit j - 1 of the element.
            let rotated = |j: usize| bit(&src, i * bits + (j + bits - 1) % bits);
            for j in 0..8 {
                assert_eq!(bit(&e, 8 * i + j), rotated(low + 8 + j));
                assert_eq!(bit(&a, 8 * i + j), rotated(low + j));
            }
            for j in 0..low {
                assert_eq!(bit(&b, low * i + j), rotated(j));
            }
        }

        kernels.split_fields_sign(width, &src, &mut s, &mut e, &mut a, &mut b);
        for i in 0..67 {
            let element = |j: usize| bit(&src, i * bits + j);
            assert_eq!(bit(&s, i), element(bits - 1));
            for j in 0..8 {
                assert_eq!(bit(&e, 8 * i + j), element(bits - 9 + j));
                let expected = if j < 7 { element(low + j) } else { 0 };
                assert_eq!(bit(&a, 8 * i + j), expected);
            }
            for j in 0..low {
                assert_eq!(bit(&b, low * i + j), element(j));
            }
        }
        assert_eq!(s[8] >> 3, 0, "bits after the last sign");
    }
}

#[test]
fn bytes_are_planes_of_the_most_significant_first() {
    let src: Vec<u8> = (0..24).collect();
    let mut dst = vec![0; 24];
    let kernels = Kernels::new(Simd::Scalar);
    kernels.split_bytes(Width::B4, &src[..12], &mut dst[..12]);
    assert_eq!(dst[..12], [3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8]);
    kernels.split_bytes(Width::B8, &src, &mut dst);
    assert_eq!(dst[..6], [7, 15, 23, 6, 14, 22]);
}

#[test]
fn parts_of_elements_go_to_their_places_in_the_planes() {
    let src: Vec<u8> = (0..16 * 500).map(|i| ((i * 37) >> 2) as u8).collect();
    for kernels in Simd::available().map(Kernels::new) {
        for width in Width::ALL {
            let (mut whole, mut parts) = (vec![0; src.len()], vec![0; src.len()]);
            kernels.split_bytes(width, &src, &mut whole);
            for (i, part) in src.chunks(128 * 16).enumerate() {
                kernels.split_bytes_part(width, part, i * 128 * 16 / width.bytes(), &mut parts);
            }
            assert_eq!(parts, whole, "{width:?} {kernels:?}");
        }
    }
}

#[test]
fn checksums_of_merged_values_are_those_of_their_bytes() {
    for kernels in Simd::available().map(Kernels::new) {
        for width in FIELDS {
            let w = width.bytes();
            let (_, noise) = patterns::all(Kind::int(width), 4099).last().expect("a pattern");
            for n in (0..300).chain([511, 512, 4099]) {
                let src = noise[..n * w].to_vec();
                let (mut e, mut a) = (vec![0; n], vec![0; n]);
                let mut b = vec![0; n * (w - 2)];
                kernels.split_fields(width, &src, &mut e, &mut a, &mut b);
                let mut back = vec![0; n * w];
                let crc = kernels.merge_fields_crc(width, &e, &a, &b, &mut back, 0);
                assert_eq!(back, src);
                assert_eq!(crc, s4_format::crc32c(&src), "{kernels:?} {width:?} {n}");
                let crc = kernels.merge_fields_crc(width, &e, &a, &b, &mut back, crc);
                let twice = [&src[..], &src].concat();
                assert_eq!(crc, s4_format::crc32c(&twice), "{kernels:?} {width:?} {n}");
            }
        }
    }
}

#[test]
fn bits_without_meaning_are_ignored_by_a_merge() {
    for simd in Simd::available() {
        for (width, n) in [(Width::B2, 101), (Width::B4, 101), (Width::B8, 13)] {
            let low = n * (width.bytes() - 2);
            let (e, b) = (vec![0x35; n], vec![0x77; low]);
            let (mut clean, mut dirty) = (vec![0; n * width.bytes()], vec![0; n * width.bytes()]);
            let kernels = Kernels::new(simd);
            let mut s = vec![0x99; n.div_ceil(8)];
            kernels.merge_fields_sign(width, &s, &e, &vec![0x41; n], &b, &mut clean);
            s[n / 8] |= 0xe0;
            kernels.merge_fields_sign(width, &s, &e, &vec![0xc1; n], &b, &mut dirty);
            assert_eq!(clean, dirty, "{simd} {width:?}");
        }
    }
}

#[test]
fn ordered_integers_are_in_the_order_of_the_values_and_no_two_are_equal() {
    let kernels = Kernels::new(Simd::Scalar);
    let mut buf: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    kernels.to_ordered(Width::B2, &mut buf);
    let ordered: Vec<i16> = buf.as_chunks().0.iter().map(|b| i16::from_le_bytes(*b)).collect();

    let mut bits: Vec<u16> = (0..=u16::MAX).collect();
    bits.sort_by_key(|x| ordered[usize::from(*x)]);
    assert!(bits.windows(2).all(|w| ordered[usize::from(w[0])] < ordered[usize::from(w[1])]));
    let value = |x: u16| f32::from_bits(u32::from(x) << 16);
    let total_order = |w: &[u16]| value(w[0]).total_cmp(&value(w[1])).is_lt();
    assert!(bits.windows(2).all(total_order));
    assert_eq!((ordered[0], ordered[0x8000]), (0, -1));
}

#[test]
fn differences_are_small_where_values_are_close() {
    let kernels = Kernels::new(Simd::Scalar);
    let bits = |values: [f32; 4]| values.map(f32::to_le_bytes).concat();
    let mut buf = bits([1.0, -1.0, -0.0, 5.0]);
    let next = |x: f32, by: i32| f32::from_bits((x.to_bits() as i32 + by) as u32);
    kernels.sub_values(Width::B4, &mut buf, &bits([next(1.0, 1), next(-1.0, 2), 0.0, 5.0]));
    // -1 ulp; +2 ulp (the other operand is further below zero); one step below +0.0; equal.
    assert_eq!(buf, [1_u32, 4, 1, 0].map(u32::to_le_bytes).concat());
}

#[test]
#[should_panic(expected = "planes e, a and b")]
fn planes_of_the_wrong_size_are_refused() {
    let (mut e, mut a) = ([0; 3], [0; 4]);
    Kernels::default().split_fields(Width::B2, &[0; 8], &mut e, &mut a, &mut []);
}
