//! Which names of clients are let in.
//!
//! Promises: pure. A name is the distinguished name of a certificate that was verified.
//! Source: QEMU's documentation of `authz-simple` and `authz-list`.

/// How a rule compares a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    /// The whole name.
    Exact(String),
    /// `*` stands for any bytes, `?` for one character.
    Glob(String),
}

/// A rule: names that it fits are let in, or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The names.
    pub names: Match,
    /// Whether these are let in.
    pub allows: bool,
}

/// Rules in their order: the first one that fits a name decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    /// The rules.
    pub rules: Vec<Rule>,
    /// Whether names that no rule fits are let in.
    pub allows_others: bool,
}

impl AllowList {
    /// Lets in these names only.
    pub fn exact(names: impl IntoIterator<Item = String>) -> AllowList {
        let rule = |name| Rule { names: Match::Exact(name), allows: true };
        AllowList { rules: names.into_iter().map(rule).collect(), allows_others: false }
    }

    /// Whether a name is let in.
    #[must_use]
    pub fn allows(&self, name: &str) -> bool {
        let found = self.rules.iter().find(|rule| match &rule.names {
            Match::Exact(exact) => exact == name,
            Match::Glob(pattern) => fits(pattern, name),
        });
        found.map_or(self.allows_others, |rule| rule.allows)
    }
}

/// Whether a name fits a pattern with `*` and `?`. Time: the product of the two lengths.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut at, mut from) = (0, 0);
    // Where to go on when the characters behind the last `*` do not fit.
    let mut last: Option<(usize, usize)> = None;
    while from < name.len() {
        match pattern.get(at) {
            Some('*') => {
                last = Some((at + 1, from));
                at += 1;
            }
            Some(&one) if one == '?' || one == name[from] => (at, from) = (at + 1, from + 1),
            _ => match last {
                None => return false,
                Some((behind, start)) => {
                    last = Some((behind, start + 1));
                    (at, from) = (behind, start + 1);
                }
            },
        }
    }
    pattern[at..].iter().all(|one| *one == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rule = |names, allows| Rule { names, allows };
        let mut list = AllowList {
            rules: vec![
                rule(Match::Exact(String::from("CN=bad,O=A")), false),
                rule(Match::Glob(String::from("CN=*,O=A")), true),
            ],
            allows_others: false,
        };
        assert!(list.allows("CN=good,O=A") && !list.allows("CN=bad,O=A"));
        assert!(!list.allows("CN=good,O=B") && !list.allows(""));
        list.allows_others = true;
        assert!(list.allows("CN=good,O=B") && !list.allows("CN=bad,O=A"));
        assert!(!AllowList::exact([String::from("CN=*")]).allows("CN=x"));
    }

    #[test]
    fn patterns_have_stars_and_question_marks() {
        for (pattern, name) in
            [("*", ""), ("a*b?d", "aXXbXbcd"), ("?", "ü"), ("a**", "a"), ("", "")]
        {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("?", ""), ("a*b", "a"), ("a", "ab"), ("*b", "a"), ("", "a")] {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
        assert!(!fits(&"a*".repeat(20), &"a".repeat(19)));
    }
}
