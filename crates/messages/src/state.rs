//! State that one process gives to the next one: JSON with the number of its version, and
//! descriptors with their roles.
//!
//! Promises: state of a version that this program does not know is refused before anything of it is
//! used, and so is state that does not hold together; the text says which version it has and which
//! ones this program reads. Control path: each call allocates.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The member with the number of the version.
const KEY: &str = "version";

/// The versions of one kind of state that this program reads; it writes the newest one.
///
/// A new version is needed when a member changes its meaning, or when a program that does not know
/// a new member must not go on without it.
#[derive(Clone, Copy, Debug)]
pub struct Versions {
    oldest: u32,
    newest: u32,
}

impl Versions {
    /// * `oldest`, `newest`: both are read, and those between them.
    #[must_use]
    pub const fn new(oldest: u32, newest: u32) -> Versions {
        assert!(oldest <= newest, "no version is read");
        Versions { oldest, newest }
    }

    /// State as an object, its version first.
    ///
    /// Errors: `words` are no object.
    pub fn to_value(self, words: &impl Serialize) -> io::Result<Value> {
        let mut all = Map::new();
        all.insert(KEY.to_owned(), self.newest.into());
        match serde_json::to_value(words)? {
            Value::Object(words) => all.extend(words),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no object")),
        }
        Ok(Value::Object(all))
    }

    /// State as text.
    ///
    /// Errors: as for [`Versions::to_value`].
    pub fn to_text(self, words: &impl Serialize) -> io::Result<String> {
        self.to_value(words).map(|value| value.to_string())
    }

    /// Errors: why this program does not go on with such a state.
    pub fn from_value<T: DeserializeOwned>(self, value: Value) -> Result<T, NotUnderstood> {
        self.check(&value[KEY])?;
        serde_json::from_value(value).map_err(NotUnderstood::unread)
    }

    /// Errors: as for [`Versions::from_value`].
    pub fn from_text<T: DeserializeOwned>(self, text: &[u8]) -> Result<T, NotUnderstood> {
        self.from_value(serde_json::from_slice(text).map_err(NotUnderstood::unread)?)
    }

    /// Errors: this program does not read this version.
    pub fn check(self, version: &Value) -> Result<(), NotUnderstood> {
        let known = u64::from(self.oldest)..=u64::from(self.newest);
        if version.as_u64().is_some_and(|version| known.contains(&version)) {
            return Ok(());
        }
        let knows = match self.oldest == self.newest {
            true => self.newest.to_string(),
            false => format!("{} to {}", self.oldest, self.newest),
        };
        Err(NotUnderstood(format!("its version is {version}, this program knows {knows}")))
    }
}

/// The descriptors of a state, each with what it is.
///
/// Errors: there are more or fewer than the state names.
pub fn with_roles<R>(
    roles: Vec<R>,
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(R, OwnedFd)>, NotUnderstood> {
    let (named, came) = (roles.len(), descriptors.len());
    if named != came {
        return Err(NotUnderstood(format!("{came} descriptors came, it names {named}")));
    }
    Ok(roles.into_iter().zip(descriptors).collect())
}

/// Why a state is not gone on with; the text says "it" for the state.
#[derive(Debug)]
pub struct NotUnderstood(String);

impl NotUnderstood {
    fn unread(error: serde_json::Error) -> NotUnderstood {
        NotUnderstood(format!("it cannot be read ({error})"))
    }
}

impl fmt::Display for NotUnderstood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotUnderstood {}

impl From<NotUnderstood> for String {
    fn from(why: NotUnderstood) -> String {
        why.0
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq, Serialize)]
    struct Words {
        size: u64,
        #[serde(default)]
        name: Option<String>,
    }

    const BOTH: Versions = Versions::new(1, 2);

    #[test]
    fn state_is_read_as_it_was_written_and_an_older_one_without_new_members() {
        let words = Words { size: u64::MAX, name: Some(String::from("a")) };
        let text = BOTH.to_text(&words).expect("an object");
        assert!(text.starts_with("{\"version\":2,"), "{text}");
        assert_eq!(BOTH.from_text::<Words>(text.as_bytes()).expect("read"), words);
        let old: Words = BOTH.from_text(b"{\"version\":1,\"size\":7}").expect("older");
        assert_eq!(old, Words { size: 7, name: None });
        assert!(BOTH.to_text(&7).is_err());
    }

    #[test]
    fn other_versions_and_what_is_no_state_are_refused_in_words() {
        for (text, why) in [
            ("{\"version\":3,\"size\":7}", "its version is 3, this program knows 1 to 2"),
            ("{\"version\":0,\"size\":7}", "its version is 0, this program knows 1 to 2"),
            ("{\"size\":7}", "its version is null, this program knows 1 to 2"),
            ("{\"version\":\"1\",\"size\":7}", "its version is \"1\", this program knows 1 to 2"),
            ("[]", "its version is null, this program knows 1 to 2"),
            ("{\"version\":1}", "it cannot be read (missing field `size`)"),
            ("no", "it cannot be read (expected ident at line 1 column 2)"),
        ] {
            let error = BOTH.from_text::<Words>(text.as_bytes()).expect_err(text);
            assert_eq!(error.to_string(), why);
        }
        let one = Versions::new(1, 1).check(&2.into()).expect_err("newer").to_string();
        assert_eq!(one, "its version is 2, this program knows 1");
    }

    #[test]
    fn each_descriptor_has_a_role() {
        let file = || OwnedFd::from(tempfile::tempfile().expect("a file"));
        assert_eq!(with_roles(vec!["a"], vec![file()]).expect("as many").len(), 1);
        for (roles, came) in [(vec!["a"], 0), (vec![], 1)] {
            let fds = (0..came).map(|_| file()).collect();
            let error = with_roles(roles.clone(), fds).expect_err("others").to_string();
            assert_eq!(error, format!("{came} descriptors came, it names {}", roles.len()));
        }
    }
}
