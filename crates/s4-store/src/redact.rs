//! Removes secrets from URLs and text before they are shown.

use std::borrow::Cow;

/// A URL without user, password, query and fragment; other text as it is.
///
/// If a password seems to contain a separator (`s3://key:sec/ret@bucket`), everything after the
/// scheme is hidden.
#[must_use]
pub fn redact_url(text: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = text.split_once("://") else { return Cow::Borrowed(text) };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, after) = rest.split_at(end);
    let path = after.split(['?', '#']).next().unwrap_or_default();
    if let Some((user, host)) = authority.rsplit_once('@') {
        // `abfs://container@account` names a container where others name a user.
        let container = scheme.starts_with("abfs") || scheme.starts_with("wasb");
        return Cow::Owned(match container && !user.contains(':') {
            true => format!("{scheme}://{user}@{host}{path}"),
            false => format!("{scheme}://{host}{path}"),
        });
    }
    let port = authority.rsplit_once(']').map_or(authority, |(_, port)| port).rsplit_once(':');
    if port.is_some_and(|(_, port)| !port.bytes().all(|b| b.is_ascii_digit())) {
        return Cow::Owned(format!("{scheme}://***"));
    }
    match scheme.len() + 3 + authority.len() + path.len() == text.len() {
        true => Cow::Borrowed(text),
        false => Cow::Owned(format!("{scheme}://{authority}{path}")),
    }
}

/// Text with every URL in it redacted.
#[must_use]
pub fn redact_text(text: &str) -> Cow<'_, str> {
    if !text.contains("://") {
        return Cow::Borrowed(text);
    }
    let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>' | '(' | ')');
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(ends) {
        let body = word.trim_end_matches(ends);
        out.push_str(&redact_url(body));
        out.push_str(&word[body.len()..]);
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_names_the_place_is_shown() {
        for (url, shown) in [
            ("s3://bucket/a/b", "s3://bucket/a/b"),
            ("s3://AKID:hush@bucket/a", "s3://bucket/a"),
            ("s3://AKID:hu@sh@bucket/a@b", "s3://bucket/a@b"),
            ("s3://AKID:hu/sh@bucket/a", "s3://***"),
            ("s3://AKID:hu?sh@bucket/a", "s3://***"),
            ("s3://AKID:hu#sh@bucket/a", "s3://***"),
            ("https://b.s3.amazonaws.com/k?X-Amz-Signature=hush", "https://b.s3.amazonaws.com/k"),
            ("https://h/c?sig=hush#hush", "https://h/c"),
            ("https://h#hush", "https://h"),
            (
                "abfs://box@account.dfs.core.windows.net/p",
                "abfs://box@account.dfs.core.windows.net/p",
            ),
            ("abfs://box:hush@account/p", "abfs://account/p"),
            ("http://127.0.0.1:9000/k", "http://127.0.0.1:9000/k"),
            ("http://[::1]:9000/k", "http://[::1]:9000/k"),
            ("http://[::1]/k", "http://[::1]/k"),
            ("runs/a?b#c", "runs/a?b#c"),
            ("", ""),
        ] {
            assert_eq!(redact_url(url), shown, "{url}");
            let text = format!("GET {url} failed (\"{url}\")");
            if !url.contains('#') || url.contains("://") {
                assert_eq!(redact_text(&text), format!("GET {shown} failed (\"{shown}\")"));
            }
        }
    }
}
