//! Reads the examples on pages of the documentation.

/// The bytes of the first line that is nothing but bytes.
pub(crate) fn side_data(page: &str) -> Vec<u8> {
    let bytes = |line: &str| -> Option<Vec<u8>> {
        let bytes = line.strip_prefix("    ")?.split_whitespace();
        bytes.map(|byte| u8::from_str_radix(byte, 16).ok()).collect()
    };
    page.lines().find_map(bytes).expect("side data")
}

/// The cells of the table whose first line starts like this and that has this many rows.
pub(crate) fn table<'a>(page: &'a str, start: &str, count: usize) -> Vec<Vec<&'a str>> {
    let rows = page.lines().skip_while(|line| !line.starts_with(start)).skip(2);
    let rows: Vec<Vec<&str>> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').collect())
        .collect();
    assert_eq!(rows.len(), count);
    rows
}

/// The hexadecimal number at the start of a cell.
pub(crate) fn hex(cell: &str) -> u32 {
    let digits = cell.trim().trim_start_matches('`').split('`').next().expect("a number");
    u32::from_str_radix(digits, 16).expect("a hexadecimal number")
}
