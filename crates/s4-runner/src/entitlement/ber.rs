//! Converts BER to DER, as far as signed data needs it: indefinite lengths, and octet strings in pieces.

/// The deepest nesting of elements.
const DEPTH: usize = 32;

const OCTETS: u8 = 0x04;
const CONSTRUCTED: u8 = 0x20;

/// The same element with definite lengths; `None` if `bytes` is not exactly one element.
pub(super) fn to_der(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![];
    let rest = element(bytes, &mut out, DEPTH)?;
    rest.is_empty().then_some(out)
}

/// Rewrites one element, and returns the bytes after it.
fn element<'a>(bytes: &'a [u8], out: &mut Vec<u8>, depth: usize) -> Option<&'a [u8]> {
    let depth = depth.checked_sub(1)?;
    let (&tag, rest) = bytes.split_first()?;
    // Tags of several bytes do not occur.
    if tag & 0x1f == 0x1f {
        return None;
    }
    let (length, rest) = length(rest)?;
    let is_pieces = tag == OCTETS | CONSTRUCTED;
    if tag & CONSTRUCTED == 0 {
        let length = length?;
        let content = rest.get(..length)?;
        write(tag, content, out);
        return rest.get(length..);
    }
    let mut content = vec![];
    let mut inner = match length {
        Some(length) => rest.get(..length)?,
        None => rest,
    };
    let after = loop {
        match (length, inner) {
            (Some(length), []) => break rest.get(length..)?,
            (None, [0, 0, after @ ..]) => break after,
            _ if is_pieces => inner = piece(inner, &mut content, depth)?,
            _ => inner = element(inner, &mut content, depth)?,
        }
    };
    write(if is_pieces { OCTETS } else { tag }, &content, out);
    Some(after)
}

/// Appends the content of one piece of an octet string, and returns the bytes after the piece.
fn piece<'a>(bytes: &'a [u8], content: &mut Vec<u8>, depth: usize) -> Option<&'a [u8]> {
    let mut whole = vec![];
    let after = element(bytes, &mut whole, depth)?;
    let (&tag, rest) = whole.split_first()?;
    let (length, text) = length(rest)?;
    if tag != OCTETS || length? != text.len() {
        return None;
    }
    content.extend_from_slice(text);
    Some(after)
}

/// Reads a length, `None` for an indefinite one, and returns it with the bytes after it.
fn length(bytes: &[u8]) -> Option<(Option<usize>, &[u8])> {
    let (&first, rest) = bytes.split_first()?;
    match first {
        0..=0x7f => Some((Some(usize::from(first)), rest)),
        0x80 => Some((None, rest)),
        0x81..=0x84 => {
            let count = usize::from(first & 0x7f);
            let number = rest.get(..count)?.iter().fold(0, |n, b| n << 8 | usize::from(*b));
            Some((Some(number), rest.get(count..)?))
        }
        _ => None,
    }
}

fn write(tag: u8, content: &[u8], out: &mut Vec<u8>) {
    out.push(tag);
    let length = content.len();
    match u8::try_from(length) {
        Ok(short @ 0..=0x7f) => out.push(short),
        _ => {
            let bytes = length.to_be_bytes();
            let skipped = bytes.iter().take_while(|b| **b == 0).count();
            out.push(0x80 | u8::try_from(bytes.len() - skipped).unwrap_or(8));
            out.extend_from_slice(&bytes[skipped..]);
        }
    }
    out.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use super::to_der;

    #[test]
    fn lengths_at_the_end_and_pieces_become_der() {
        let ber = [0x30, 0x80, 0x24, 0x80, 4, 1, b'a', 4, 2, b'b', b'c', 0, 0, 2, 1, 7, 0, 0];
        assert_eq!(to_der(&ber).unwrap(), [0x30, 8, 4, 3, b'a', b'b', b'c', 2, 1, 7]);
        let der = [0x30, 3, 2, 1, 7];
        assert_eq!(to_der(&der).unwrap(), der);
        let mut long = vec![4, 0x82, 1, 0];
        long.extend([9; 256]);
        assert_eq!(to_der(&long).unwrap(), long);
    }

    #[test]
    fn what_is_cut_damaged_or_nested_without_end_is_refused() {
        let ber = [0x30, 0x80, 0x24, 0x80, 4, 1, b'a', 0, 0, 2, 1, 7, 0, 0];
        for cut in 0..ber.len() {
            assert_eq!(to_der(&ber[..cut]), None, "{cut}");
        }
        assert_eq!(to_der(&[ber.as_slice(), &[0]].concat()), None);
        assert_eq!(to_der(&[[0x30, 0x80]; 1000].concat()), None);
        // A piece of another type, a primitive of indefinite length, and a length of 4 GiB.
        assert_eq!(to_der(&[0x24, 3, 2, 1, 7]), None);
        assert_eq!(to_der(&[0x04, 0x80, 0, 0]), None);
        assert_eq!(to_der(&[4, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }
}
