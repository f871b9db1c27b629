//! Texts without passwords and keys.
//!
//! Promises: pure, for any text. What is left out is said in its place. More is left out than has
//! to be where a text can be read in two ways: the rest of a word that has a secret in it.

/// What stands in place of it.
const LEFT_OUT: &str = "(left out)";

/// Words that a secret follows, behind `=` or `:`; in any case, also in the middle of a longer
/// word.
const NAMES: [&str; 10] = [
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "credential",
    "authorization",
    "cookie",
    "psk",
    "key=",
];

/// Where a private key begins and ends, in the form in which certificates are kept (RFC 7468).
const KEY_BEGINS: &str = "-----BEGIN ";
const KEY_ENDS: &str = "-----END ";
const KEY_LABEL: &str = "PRIVATE KEY-----";

/// Leaves the secrets of a text of lines out: of a log, of JSON.
pub(super) fn without_secrets(text: &str) -> String {
    let text = without_keys(text);
    let mut clean = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        clean.push_str(&without_values(&without_users(line)));
    }
    clean
}

/// The words of a command line, one on each line, without secrets.
pub(super) fn words_without_secrets(words: &[String]) -> String {
    let mut lines = Vec::new();
    let mut is_value = false;
    for word in words {
        lines.push(match is_value {
            true => LEFT_OUT.to_owned(),
            false => word_without_secrets(word),
        });
        // `--password VALUE`.
        is_value = !is_value && word.starts_with('-') && !word.contains('=') && names(word);
    }
    lines.join("\n")
}

/// A word of a command line, which may have spaces in it: all that comes after a secret's name is
/// taken for a secret.
fn word_without_secrets(word: &str) -> String {
    // First, as a password may have any name in it.
    let word = match (word.find("://"), word.rfind('@')) {
        (Some(scheme), Some(at)) if scheme < at => {
            format!("{}{LEFT_OUT}{}", &word[..scheme + 3], &word[at..])
        }
        _ => word.to_owned(),
    };
    let name = name_in(&word).map(|(at, _)| at);
    let end = name.and_then(|at| Some(at + word[at..].find(['=', ':'])? + 1));
    end.map_or_else(|| word.clone(), |end| format!("{}{LEFT_OUT}", &word[..end]))
}

fn names(word: &str) -> bool {
    name_in(word).is_some()
}

/// The first name of a secret: where it begins and ends.
fn name_in(text: &str) -> Option<(usize, usize)> {
    // As long as the text itself.
    let small = text.to_ascii_lowercase();
    let found = NAMES.iter().filter_map(|name| Some((small.find(name)?, name.len())));
    found.min().map(|(at, len)| (at, at + len))
}

/// Private keys.
fn without_keys(text: &str) -> String {
    let mut clean = String::new();
    let mut rest = text;
    loop {
        let begins = key_line(rest, KEY_BEGINS);
        let ends = key_line(rest, KEY_ENDS);
        match (begins, ends) {
            // A text that begins in the middle of a key.
            (begins, Some((_, after))) if begins.is_none_or(|(at, _)| at > after) => {
                clean.push_str(LEFT_OUT);
                rest = &rest[after..];
            }
            (Some((at, after)), _) => {
                clean.push_str(&rest[..at]);
                clean.push_str(LEFT_OUT);
                let end = key_line(&rest[after..], KEY_ENDS).map(|(_, end)| after + end);
                rest = end.map_or("", |end| &rest[end..]);
            }
            (None, _) => break,
        }
    }
    clean.push_str(rest);
    clean
}

/// The first line of a private key that begins with `what`: where it begins and ends.
fn key_line(text: &str, what: &str) -> Option<(usize, usize)> {
    let mut from = 0;
    loop {
        let at = from + text[from..].find(what)?;
        let label = at + what.len();
        let line = text[label..].lines().next().unwrap_or_default();
        if let Some(end) = line.find(KEY_LABEL) {
            // Of another line where several are in one word, as JSON has them.
            if !line[..end].contains("-----") {
                return Some((at, label + end + KEY_LABEL.len()));
            }
        }
        from = label;
    }
}

/// Users and passwords of addresses: `scheme://user:password@host`.
fn without_users(line: &str) -> String {
    let is_end = |char: char| char.is_whitespace() || "\"'`".contains(char);
    let mut clean = String::new();
    let mut rest = line;
    while let Some(scheme) = rest.find("://") {
        let (before, after) = rest.split_at(scheme + 3);
        let (word, next) = after.split_at(after.find(is_end).unwrap_or(after.len()));
        clean.push_str(before);
        match word.rfind('@') {
            Some(at) => {
                clean.push_str(LEFT_OUT);
                clean.push_str(&word[at..]);
            }
            None => clean.push_str(word),
        }
        rest = next;
    }
    clean.push_str(rest);
    clean
}

/// Values behind the names of secrets.
fn without_values(line: &str) -> String {
    let mut clean = String::new();
    let mut rest = line;
    while let Some((_, end)) = name_in(rest) {
        let (before, after) = rest.split_at(end);
        clean.push_str(before);
        rest = after;
        // The name ends with its sign already, or is the first part of a longer one.
        let sign = match before.ends_with('=') {
            true => Some(0),
            false => sign_in(rest),
        };
        if let Some(sign) = sign {
            let (name, value) = rest.split_at(sign);
            clean.push_str(name);
            let len = value_len(value, &before.to_ascii_lowercase());
            if len > 0 {
                clean.push_str(LEFT_OUT);
            }
            rest = &value[len..];
        }
    }
    clean.push_str(rest);
    clean
}

/// Where the sign behind the rest of a name ends. `None`: it is no name of a value.
fn sign_in(text: &str) -> Option<usize> {
    let is_name = |char: char| char.is_ascii_alphanumeric() || "-_.".contains(char);
    let rest = text.trim_start_matches(is_name);
    let rest = rest.trim_start_matches(['\\', '"', '\'', ' ', '\t']);
    let rest = rest.strip_prefix(['=', ':'])?;
    Some(text.len() - rest.len())
}

/// Bytes of a value, with the quotes around it.
///
/// * `name`: what stands before it, in small letters.
fn value_len(text: &str, name: &str) -> usize {
    // More than one word: `Authorization: Bearer …`.
    if name.ends_with("authorization") || name.ends_with("cookie") {
        return text.trim_end_matches(['\n', '\r']).len();
    }
    let value = text.trim_start_matches([' ', '\t']);
    let blank = text.len() - value.len();
    let quote = value.trim_start_matches('\\').chars().next().filter(|char| "\"'".contains(*char));
    let Some(quote) = quote else {
        return blank + value.find(char::is_whitespace).unwrap_or(value.len());
    };
    // Escaped quotes of JSON in JSON end as they begin.
    let open = value.find(quote).unwrap_or_default() + 1;
    let mark = &value[..open];
    let mut from = open;
    loop {
        let Some(at) = value[from..].find(mark) else {
            return text.trim_end_matches(['\n', '\r']).len();
        };
        let at = from + at;
        let is_escaped = value[..at].ends_with('\\');
        if !is_escaped {
            return blank + at + mark.len();
        }
        from = at + mark.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_command_line_lose_their_secrets_and_nothing_else() {
        for (word, expected) in [
            ("--pidfile=/run/a", "--pidfile=/run/a"),
            ("nbd://host/name", "nbd://host/name"),
            ("nbd://me:pw@host/name", "nbd://(left out)@host/name"),
            ("nbd://me:p@w w@host/name", "nbd://(left out)@host/name"),
            ("a=nbd://me:pw@h/x,b=nbd://you:pw@g/y", "a=nbd://(left out)@g/y"),
            ("rbd:pool/a:key=AQ==", "rbd:pool/a:key=(left out)"),
            ("--token=abc", "--token=(left out)"),
            ("json:{\"password\": \"a b\"}", "json:{\"password\":(left out)"),
            ("secret,id=s,data=abc", "secret,id=(left out)"),
            ("/images/token.qcow2", "/images/token.qcow2"),
            ("nbd://me:secret@host:10809/token", "nbd://(left out)@host:10809/token"),
            ("a@b", "a@b"),
            // Characters that have another length in small letters.
            ("\u{130}\u{130}-PassWord=abc\u{130}", "\u{130}\u{130}-PassWord=(left out)"),
        ] {
            assert_eq!(word_without_secrets(word), expected);
        }
        let words = ["mount", "--Password", "abc def", "--token=x", "y", "disk"];
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let lines = "mount\n--Password\n(left out)\n--token=(left out)\ny\ndisk";
        assert_eq!(words_without_secrets(&words), lines);
    }

    #[test]
    fn lines_lose_their_secrets_and_nothing_else() {
        for (line, expected) in [
            ("a line\n", "a line\n"),
            (
                "cannot open 'nbd://me:p@w@host/x': gone, nbds://u@h\n",
                "cannot open 'nbd://(left out)@host/x': gone, nbds://(left out)@h\n",
            ),
            ("\"filename\": \"nbd://h/x\",\n", "\"filename\": \"nbd://h/x\",\n"),
            ("  \"password\": \"a \\\" b\",\n", "  \"password\":(left out),\n"),
            ("{\"a-token\":\"x\",\"b\":1}", "{\"a-token\":(left out),\"b\":1}"),
            (
                "json:{\\\"Secret\\\": \\\"x y\\\", \\\"b\\\": 1}",
                "json:{\\\"Secret\\\":(left out), \\\"b\\\": 1}",
            ),
            ("password=a b secret_key='c d' e", "password=(left out) b secret_key=(left out) e"),
            ("key=AQ== password:", "key=(left out) password:"),
            ("Authorization: Bearer abc\nb\n", "Authorization:(left out)\nb\n"),
            ("no password is asked for\n", "no password is asked for\n"),
            ("password=\"no end", "password=(left out)"),
        ] {
            assert_eq!(without_secrets(line), expected);
        }
    }

    #[test]
    fn private_keys_are_left_out_wherever_a_text_begins_and_ends() {
        let begin = "-----BEGIN RSA PRIVATE KEY-----";
        let end = "-----END RSA PRIVATE KEY-----";
        let other = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----";
        for (text, expected) in [
            (format!("a\n{begin}\nMIIE\nabc\n{end}\nb\n"), "a\n(left out)\nb\n".to_owned()),
            (format!("a {begin}\\nMIIE\\n{end} b"), "a (left out) b".to_owned()),
            (format!("MIIE\n{end}\nb {begin}\nMIIF"), "(left out)\nb (left out)".to_owned()),
            (
                format!("{other}\n{begin}\nMIIE\n{end}{other}"),
                format!("{other}\n(left out){other}"),
            ),
            (format!("a {other} b"), format!("a {other} b")),
            (format!("{end}{end}"), "(left out)(left out)".to_owned()),
        ] {
            assert_eq!(without_secrets(&text), expected);
        }
    }

    #[test]
    fn any_text_can_be_looked_at() {
        let parts = [
            "password", "=", ":", "\"", "\\", "'", " ", "://", "@", "\n", "\u{130}", "ß",
            KEY_BEGINS, KEY_ENDS, KEY_LABEL, "key=", "-",
        ];
        let mut state = 7_u64;
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..8 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(state >> 33).expect("small") % parts.len();
                text.push_str(parts[at]);
            }
            without_secrets(&text);
            words_without_secrets(&[text.clone(), text]);
        }
    }
}
