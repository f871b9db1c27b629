//! Words of a command line, taken apart as GNU `getopt_long` does it.
//!
//! Promises: options and operands may be mixed; `--` ends the options; a long option may be
//! shortened as long as one name begins so; short options may share a word; the texts of errors
//! are those of glibc. (The libraries for command lines know neither these texts nor shortened
//! names together with values of their own.)

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// An option.
#[derive(Debug)]
pub(crate) struct Known<T> {
    /// Its letter, if it has one.
    pub(crate) short: Option<u8>,
    /// Its name without the dashes.
    pub(crate) long: &'static str,
    pub(crate) takes_value: bool,
    /// What it is for the caller.
    pub(crate) id: T,
}

/// One word, or two.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Word<T> {
    /// An option, with its value where it takes one.
    Option(T, Option<OsString>),
    /// Anything else.
    Operand(OsString),
}

/// Takes words apart, one after the other, in their order.
///
/// An item that is an error has the text of glibc, without the name of the program.
pub(crate) struct Words<'a, T, I> {
    known: &'a [Known<T>],
    words: I,
    /// Letters of a word with several that are not taken yet.
    letters: Vec<u8>,
    /// `--` was there.
    all_are_operands: bool,
}

impl<'a, T: Copy, I: Iterator<Item = OsString>> Words<'a, T, I> {
    pub(crate) fn new(known: &'a [Known<T>], words: I) -> Self {
        Words { known, words, letters: Vec::new(), all_are_operands: false }
    }
}

impl<T: Copy, I: Iterator<Item = OsString>> Iterator for Words<'_, T, I> {
    type Item = Result<Word<T>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.letters.is_empty() {
            return Some(self.letter());
        }
        let word = self.words.next()?;
        let bytes = word.as_bytes();
        if self.all_are_operands || bytes.len() < 2 || bytes[0] != b'-' {
            return Some(Ok(Word::Operand(word)));
        }
        if bytes == b"--" {
            self.all_are_operands = true;
            return self.next();
        }
        if let Some(long) = bytes.strip_prefix(b"--") {
            return Some(long_option(self.known, long, &mut self.words));
        }
        self.letters = bytes[1..].to_vec();
        Some(self.letter())
    }
}

impl<T: Copy, I: Iterator<Item = OsString>> Words<'_, T, I> {
    /// The first of the letters that are left.
    fn letter(&mut self) -> Result<Word<T>, String> {
        let letter = self.letters.remove(0);
        let shown = char::from(letter);
        let Some(option) = self.known.iter().find(|option| option.short == Some(letter)) else {
            return Err(format!("invalid option -- '{shown}'"));
        };
        if !option.takes_value {
            return Ok(Word::Option(option.id, None));
        }
        let value = match self.letters.is_empty() {
            false => OsString::from_vec(std::mem::take(&mut self.letters)),
            true => {
                let next = self.words.next();
                next.ok_or_else(|| format!("option requires an argument -- '{shown}'"))?
            }
        };
        Ok(Word::Option(option.id, Some(value)))
    }
}

/// * `text`: what follows `--`.
fn long_option<T: Copy>(
    known: &[Known<T>],
    text: &[u8],
    words: &mut impl Iterator<Item = OsString>,
) -> Result<Word<T>, String> {
    let (name, value) = match text.iter().position(|byte| *byte == b'=') {
        Some(at) => (&text[..at], Some(OsStr::from_bytes(&text[at + 1..]).to_owned())),
        None => (text, None),
    };
    let option = by_name(known, name)?;
    let long = option.long;
    let value = match (option.takes_value, value) {
        (true, Some(value)) => Some(value),
        (true, None) => {
            let next = words.next();
            Some(next.ok_or_else(|| format!("option '--{long}' requires an argument"))?)
        }
        (false, Some(_)) => return Err(format!("option '--{long}' doesn't allow an argument")),
        (false, None) => None,
    };
    Ok(Word::Option(option.id, value))
}

/// The option of this name, or the only one whose name begins so.
fn by_name<'a, T>(known: &'a [Known<T>], name: &[u8]) -> Result<&'a Known<T>, String> {
    let shown = String::from_utf8_lossy(name);
    if let Some(option) = known.iter().find(|option| option.long.as_bytes() == name) {
        return Ok(option);
    }
    let begin_so: Vec<_> =
        known.iter().filter(|option| option.long.as_bytes().starts_with(name)).collect();
    match begin_so.as_slice() {
        [] => Err(format!("unrecognized option '--{shown}'")),
        [only] => Ok(only),
        several => {
            let names: Vec<_> = several.iter().map(|o| format!("'--{}'", o.long)).collect();
            let names = names.join(" ");
            Err(format!("option '--{shown}' is ambiguous; possibilities: {names}"))
        }
    }
}

#[cfg(test)]
mod tests;
