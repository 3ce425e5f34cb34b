//! Tables of frequencies: their contents, and their form in a stream.

use s4_format::{Error, Result};

/// The most tables that one stream may use.
pub const MAX_TABLES: usize = 16;

/// Probability bits of a stream: the parameter `P` of docs/codecs/rans.md.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// 8 bits, renormalised once for two symbols: few symbols, highest speed.
    P8,
    /// 12 bits, renormalised for each symbol: large or very skewed alphabets.
    P12,
}

impl Precision {
    /// `P`, which is also the parameter of the stream.
    pub fn bits(self) -> u32 {
        match self {
            Self::P8 => 8,
            Self::P12 => 12,
        }
    }

    /// `2^P`: what the frequencies of a table and its escape add up to.
    pub fn total(self) -> u32 {
        1 << self.bits()
    }

    /// The precision that a stream's parameter names.
    ///
    /// # Errors
    /// `Unsupported` unless it is 8 or 12.
    pub fn from_param(param: u8) -> Result<Self> {
        match param {
            8 => Ok(Self::P8),
            12 => Ok(Self::P12),
            _ => Err(Error::unsupported(format!("rans with P = {param}"))),
        }
    }

    /// Bytes of one frequency in a stream.
    pub(crate) fn freq_len(self) -> usize {
        match self {
            Self::P8 => 1,
            Self::P12 => 2,
        }
    }
}

/// A symbol of a table and its frequency.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableEntry {
    /// The symbol.
    pub symbol: u8,
    /// Its frequency, at least 1.
    pub freq: u16,
}

/// A valid table: frequencies of symbols, in the order in which they own slots, and the frequency
/// of the escape. Together they are `2^P`.
#[derive(Clone, PartialEq, Eq)]
pub struct Table {
    precision: Precision,
    escape: u16,
    count: u16,
    entries: [TableEntry; 256],
}

impl Table {
    /// A table of `entries`, in this order, in which the escape gets what they leave of `2^P`.
    ///
    /// # Errors
    /// `Corrupt` if a symbol occurs twice, a frequency is 0 (or above 255 with `P = 8`), or they
    /// add up to more than `2^P`.
    pub fn new(precision: Precision, entries: &[TableEntry]) -> Result<Self> {
        let total = precision.total();
        let max_freq = if precision == Precision::P8 { 255 } else { 4096 };
        let mut seen = [false; 256];
        let mut sum = 0;
        for entry in entries {
            if std::mem::replace(&mut seen[usize::from(entry.symbol)], true) {
                return Err(Error::corrupt(format!(
                    "symbol {} appears twice in a frequency table",
                    entry.symbol
                )));
            }
            if entry.freq == 0 || entry.freq > max_freq {
                return Err(Error::corrupt(format!(
                    "invalid frequency {} in a frequency table",
                    entry.freq
                )));
            }
            sum += u32::from(entry.freq);
        }
        if sum > total {
            return Err(Error::corrupt(format!(
                "frequencies add up to {sum}, at most {total} allowed"
            )));
        }
        Ok(Self::of_valid(precision, entries))
    }

    /// A table of entries that are known to be as [`Table::new`] requires.
    pub(crate) fn of_valid(precision: Precision, entries: &[TableEntry]) -> Self {
        let sum: u32 = entries.iter().map(|entry| u32::from(entry.freq)).sum();
        let mut table = Self {
            precision,
            escape: (precision.total() - sum) as u16,
            count: entries.len() as u16,
            entries: [TableEntry::default(); 256],
        };
        table.entries[..entries.len()].copy_from_slice(entries);
        table
    }

    /// Reads the table at the start of `src`; returns it and its length in bytes.
    ///
    /// # Errors
    /// `Truncated` if `src` ends within it; `Corrupt` if it is not a table.
    pub fn parse(precision: Precision, src: &[u8]) -> Result<(Self, usize)> {
        let cut = || Error::truncated("frequency table ends early");
        let ([c0, c1, e0, e1], rest) = src.split_first_chunk::<4>().ok_or_else(cut)?;
        let count = usize::from(u16::from_le_bytes([*c0, *c1]));
        let escape = u16::from_le_bytes([*e0, *e1]);
        if count > 256 {
            return Err(Error::corrupt(format!(
                "frequency table has {count} symbols, at most 256 allowed"
            )));
        }
        let freq_len = precision.freq_len();
        let (symbols, rest) = rest.split_at_checked(count).ok_or_else(cut)?;
        let freqs = rest.get(..count * freq_len).ok_or_else(cut)?;
        let mut entries = [TableEntry::default(); 256];
        for ((entry, &symbol), freq) in entries.iter_mut().zip(symbols).zip(freqs.chunks(freq_len))
        {
            let freq = u16::from(freq[0]) | freq.get(1).map_or(0, |&high| u16::from(high) << 8);
            *entry = TableEntry { symbol, freq };
        }
        let table = Self::new(precision, &entries[..count])?;
        if table.escape != escape {
            return Err(Error::corrupt(format!(
                "escape has frequency {escape}, expected {}",
                table.escape
            )));
        }
        let len = table.encoded_len();
        Ok((table, len))
    }

    /// Appends the table to `dst` as a stream stores it.
    pub fn write(&self, dst: &mut Vec<u8>) {
        let at = dst.len();
        dst.resize(at + self.encoded_len(), 0);
        self.write_to(&mut dst[at..]);
    }

    /// Writes the table to the start of `dst`, which is large enough; returns its length.
    pub(crate) fn write_to(&self, dst: &mut [u8]) -> usize {
        let count = self.entries().len();
        dst[..2].copy_from_slice(&self.count.to_le_bytes());
        dst[2..4].copy_from_slice(&self.escape.to_le_bytes());
        let (symbols, freqs) = dst[4..].split_at_mut(count);
        let freq_len = self.precision.freq_len();
        for (i, entry) in self.entries().iter().enumerate() {
            symbols[i] = entry.symbol;
            freqs[i * freq_len..][..freq_len]
                .copy_from_slice(&entry.freq.to_le_bytes()[..freq_len]);
        }
        self.encoded_len()
    }

    /// Bytes that the table takes in a stream.
    pub fn encoded_len(&self) -> usize {
        encoded_len(self.precision, self.count.into())
    }

    /// The table's `P`.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Frequency of the escape, which owns the slots from 0 on.
    pub fn escape(&self) -> u16 {
        self.escape
    }

    /// Symbols and frequencies in the order of their slots, which follow those of the escape.
    pub fn entries(&self) -> &[TableEntry] {
        &self.entries[..usize::from(self.count)]
    }

    /// The entries, each with its first slot.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (TableEntry, u16)> + '_ {
        self.entries().iter().scan(self.escape, |slot, entry| {
            let start = *slot;
            *slot += entry.freq;
            Some((*entry, start))
        })
    }

    /// The symbol that blocks that are not full are padded with.
    pub(crate) fn padding(&self) -> u8 {
        self.entries().last().map_or(0, |entry| entry.symbol)
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("precision", &self.precision)
            .field("escape", &self.escape)
            .field("entries", &self.entries())
            .finish()
    }
}

/// Bytes that a table of `entries` entries takes in a stream.
pub(super) fn encoded_len(precision: Precision, entries: usize) -> usize {
    4 + entries * (1 + precision.freq_len())
}

/// Reads tables that follow each other and fill `src`: a tensor's shared tables.
///
/// # Errors
/// As [`Table::parse`]; `Corrupt` if there are none, or more than [`MAX_TABLES`].
pub fn parse_tables(precision: Precision, mut src: &[u8]) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    while !src.is_empty() && tables.len() <= MAX_TABLES {
        let (table, len) = Table::parse(precision, src)?;
        tables.push(table);
        src = &src[len..];
    }
    check_tables(tables.len())?;
    Ok(tables)
}

/// Checks the number of tables of a stream.
pub(crate) fn check_tables(count: usize) -> Result<()> {
    if !(1..=MAX_TABLES).contains(&count) {
        return Err(Error::corrupt(format!("{count} tables, 1 to {MAX_TABLES} allowed")));
    }
    Ok(())
}

/// Tables one after the other, as [`parse_tables`] reads them.
pub fn write_tables(tables: &[Table]) -> Vec<u8> {
    let mut dst = Vec::with_capacity(tables.iter().map(Table::encoded_len).sum());
    for table in tables {
        table.write(&mut dst);
    }
    dst
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(list: &[(u8, u16)]) -> Vec<TableEntry> {
        list.iter().map(|&(symbol, freq)| TableEntry { symbol, freq }).collect()
    }

    #[test]
    fn written_tables_are_read_again() {
        let tables8 = [
            Table::new(Precision::P8, &[]).unwrap(),
            Table::new(Precision::P8, &entries(&[(7, 255)])).unwrap(),
            Table::new(Precision::P8, &entries(&[(1, 1), (0, 55), (255, 200)])).unwrap(),
        ];
        assert_eq!(parse_tables(Precision::P8, &write_tables(&tables8)).unwrap(), tables8);
        let tables12 = [
            Table::new(Precision::P12, &[]).unwrap(),
            Table::new(Precision::P12, &entries(&[(7, 4096)])).unwrap(),
        ];
        assert_eq!(parse_tables(Precision::P12, &write_tables(&tables12)).unwrap(), tables12);
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let bad = |list: &[(u8, u16)]| Table::new(Precision::P8, &entries(list)).is_err();
        assert!(bad(&[(1, 0)]) && bad(&[(1, 256)]) && bad(&[(1, 2), (1, 3)]));
        assert!(bad(&[(1, 200), (2, 57)]));
        let good = [1, 0, 1, 0, 9, 255];
        assert!(Table::parse(Precision::P8, &good).is_ok());
        for cut in 0..good.len() {
            let error = Table::parse(Precision::P8, &good[..cut]).unwrap_err();
            assert!(matches!(error, Error::Truncated { .. }), "{error}");
        }
        assert!(Table::parse(Precision::P8, &[1, 0, 2, 0, 9, 255]).is_err(), "wrong escape");
        assert!(Table::parse(Precision::P8, &[1, 1, 1, 0, 9, 255]).is_err(), "257 symbols");
        assert!(parse_tables(Precision::P8, &[]).is_err());
        assert!(parse_tables(Precision::P8, &good.repeat(17)).is_err());
    }

    #[test]
    fn slots_follow_the_escape() {
        let table = Table::new(Precision::P8, &entries(&[(5, 10), (6, 200)])).unwrap();
        assert_eq!(table.escape(), 46);
        assert_eq!(table.slots().map(|(_, start)| start).collect::<Vec<_>>(), [46, 56]);
        assert_eq!(table.padding(), 6);
    }
}
