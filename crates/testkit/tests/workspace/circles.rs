//! Inside a crate, and inside each of its folders, modules use one another in one direction only.
//!
//! Promises: reads the source files that the module tree of a crate names, as text, and changes
//! nothing. Counted are the paths that begin with `crate`, `$crate` or `super`, in `use` and
//! elsewhere; a name that the crate's root exports again leads to the module that has it. Code that
//! is compiled for tests only is left out, and so are comments and strings. Calls of methods are
//! not seen: a method may be written in a module above the one that has its type.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Crates (folders below `crates`) whose modules still form circles. It may only become shorter.
const NOT_YET: [&str; 0] = [];

/// Where a module uses another one: for each pair of modules, the files that do.
pub(crate) type Uses = BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>>;

/// One word or sign of a source file.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// Identifier or keyword.
    Word(String),
    /// `::`
    Colons,
    Sign(char),
    /// A string: its content, for `#[path]`.
    Text(String),
}

/// The circles of the crate whose source is in `src`, between the modules at its top and between
/// those inside each folder: one line for each, with the files that make it.
pub(crate) fn circles(src: &Path) -> Vec<String> {
    let files = read_crate(src);
    let folders: BTreeSet<&[String]> =
        files.iter().filter_map(|file| Some(file.module.split_last()?.1)).collect();
    folders.iter().flat_map(|folder| circles_inside(&uses_inside(&files, folder), folder)).collect()
}

/// The circles between the modules of one folder.
fn circles_inside(uses: &Uses, folder: &[String]) -> Vec<String> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        uses.keys().map(|module| (module, reachable(uses, module))).collect();
    let mut done: BTreeSet<&String> = BTreeSet::new();
    let mut found = Vec::new();
    for (module, others) in &reach {
        if !others.contains(module) || done.contains(module) {
            continue;
        }
        let circle: BTreeSet<&String> = others
            .iter()
            .filter(|other| reach.get(*other).is_some_and(|back| back.contains(module)))
            .copied()
            .collect();
        let edges = uses.iter().filter(|(from, _)| circle.contains(from)).flat_map(|(from, to)| {
            to.iter().filter(|(to, _)| circle.contains(to)).map(move |(to, files)| {
                let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
                format!("{from} uses {to} ({})", files.join(", "))
            })
        });
        let edges: Vec<String> = edges.collect();
        found.push(format!("{}{circle:?}: {}", folder.join("/"), edges.join("; ")));
        done.extend(circle);
    }
    found
}

/// All modules that `module` uses, directly or through others.
fn reachable<'a>(uses: &'a Uses, module: &String) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut waiting: Vec<&String> = uses.get(module).into_iter().flat_map(BTreeMap::keys).collect();
    while let Some(next) = waiting.pop() {
        if seen.insert(next) {
            waiting.extend(uses.get(next).into_iter().flat_map(BTreeMap::keys));
        }
    }
    seen
}

/// Which of the modules at the top of a crate uses which.
pub(crate) fn uses(src: &Path) -> Uses {
    uses_inside(&read_crate(src), &[])
}

/// All files of a crate.
fn read_crate(src: &Path) -> Vec<File> {
    let root = ["lib.rs", "main.rs"].map(|name| src.join(name));
    let mut files = Vec::new();
    if let Some(root) = root.into_iter().find(|path| path.exists()) {
        read_module(&root, src, &[], &mut files);
    }
    files
}

/// Which of the modules directly inside `folder` uses which. What the folder's own file says is
/// left out: it joins its modules, and they use what stands in it.
fn uses_inside(files: &[File], folder: &[String]) -> Uses {
    let below =
        |module: &[String]| module.strip_prefix(folder).and_then(<[String]>::first).cloned();
    let modules: BTreeSet<String> = files.iter().filter_map(|file| below(&file.module)).collect();
    let all: BTreeSet<&[String]> = files.iter().map(|file| file.module.as_slice()).collect();
    let imports = imports_of_folders(files, &all);
    let mut uses: Uses = modules.iter().map(|module| (module.clone(), BTreeMap::new())).collect();
    for file in files {
        let Some(own) = below(&file.module) else { continue };
        for path in &file.paths {
            let Some(path) = absolute(&file.module, path) else { continue };
            let Some(target) = below(&origin(path, &imports, &all)) else { continue };
            if target != own
                && let Some(targets) = uses.get_mut(&own)
                && modules.contains(&target)
            {
                targets.entry(target).or_default().insert(file.name.clone());
            }
        }
    }
    uses
}

/// Names that a module has from modules below it by `use`, and where they come from, from the root
/// of the crate.
fn imports_of_folders(
    files: &[File],
    all: &BTreeSet<&[String]>,
) -> BTreeMap<Vec<String>, Vec<String>> {
    let mut imports = BTreeMap::new();
    for file in files {
        for path in &file.imports {
            let relative = path.strip_prefix(&["self".to_owned()]).unwrap_or(path);
            let from_root = absolute(&file.module, path)
                .unwrap_or_else(|| [file.module.as_slice(), relative].concat());
            let is_below = from_root.len() > file.module.len() + 1
                && from_root.starts_with(&file.module)
                && all.contains(&from_root[..=file.module.len()]);
            if let Some(name) = path.last().filter(|_| is_below) {
                imports.insert(
                    [file.module.as_slice(), std::slice::from_ref(name)].concat(),
                    from_root,
                );
            }
        }
    }
    imports
}

/// Where a name stands that a path leads to: imports on the way are followed.
fn origin(
    path: Vec<String>,
    imports: &BTreeMap<Vec<String>, Vec<String>>,
    all: &BTreeSet<&[String]>,
) -> Vec<String> {
    let mut path = path;
    // Each import leads to a module further down; the limit is for source that does not compile.
    for _ in 0..16 {
        let modules = (0..=path.len()).rev().find(|len| all.contains(&path[..*len])).unwrap_or(0);
        let Some(origin) = path.get(..=modules).and_then(|name| imports.get(name)) else { break };
        path = [origin, &path[modules + 1..]].concat();
    }
    path
}

/// A path that begins with `crate` or `super`, from the root of the crate; `None`: another path.
fn absolute(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let up = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "super" => {
            let kept = module.len().checked_sub(up)?;
            Some(module[..kept].iter().chain(&path[up..]).cloned().collect())
        }
        _ => None,
    }
}

/// What one file, or a module written inside a file, says.
struct File {
    /// Relative to `src`.
    name: PathBuf,
    /// Names of the modules from the root down to this one.
    module: Vec<String>,
    /// Paths that begin with `crate` or `super`.
    paths: Vec<Vec<String>>,
    /// All paths of `use`.
    imports: Vec<Vec<String>>,
}

/// Reads a file and those of the modules that it declares.
fn read_module(path: &Path, src: &Path, module: &[String], files: &mut Vec<File>) {
    let Ok(text) = std::fs::read_to_string(path) else { return };
    let tokens = tokens(&text);
    let name = path.strip_prefix(src).unwrap_or(path).to_path_buf();
    // Where the files of modules are that this file declares.
    let is_folder = path.file_name().is_some_and(|name| {
        ["lib.rs", "main.rs", "mod.rs"].iter().any(|folder| name.to_str() == Some(folder))
    });
    let parent = path.parent().unwrap_or(src);
    let folder = if is_folder {
        parent.to_path_buf()
    } else {
        parent.join(path.file_stem().unwrap_or_default())
    };
    read_items(&tokens, &Place { src, parent, folder, name }, module, files);
}

/// Where a file is.
struct Place<'a> {
    src: &'a Path,
    /// What `#[path]` is relative to.
    parent: &'a Path,
    /// Where files of modules are that it declares.
    folder: PathBuf,
    name: PathBuf,
}

fn read_items(tokens: &[Token], place: &Place<'_>, module: &[String], files: &mut Vec<File>) {
    let mut file = File {
        name: place.name.clone(),
        module: module.to_vec(),
        paths: Vec::new(),
        imports: Vec::new(),
    };
    let mut at = 0;
    // A path that the attributes before an item name.
    let mut other_path: Option<String> = None;
    while at < tokens.len() {
        match &tokens[at] {
            Token::Sign('#') => {
                let end = end_of_attribute(tokens, at);
                let attribute = &tokens[at..end];
                at = end;
                if is_for_tests(attribute) {
                    at = end_of_item(tokens, end);
                } else if attribute.get(2) == Some(&Token::Word("path".to_owned())) {
                    other_path = attribute.iter().find_map(|token| match token {
                        Token::Text(text) => Some(text.clone()),
                        _ => None,
                    });
                }
            }
            Token::Word(word) if word == "mod" => {
                let Some(Token::Word(name)) = tokens.get(at + 1) else {
                    at += 1;
                    continue;
                };
                let inner: Vec<String> = module.iter().chain([name]).cloned().collect();
                match tokens.get(at + 2) {
                    Some(Token::Sign(';')) => {
                        let path = match other_path.take() {
                            Some(path) => place.parent.join(path),
                            None => file_of(&place.folder, name),
                        };
                        read_module(&path, place.src, &inner, files);
                        at += 3;
                    }
                    Some(Token::Sign('{')) => {
                        let end = end_of_item(tokens, at);
                        let folder = place.folder.join(name);
                        let inside = Place { folder, name: place.name.clone(), ..*place };
                        read_items(&tokens[at + 3..end - 1], &inside, &inner, files);
                        at = end;
                    }
                    _ => at += 1,
                }
            }
            Token::Word(word) if word == "use" => {
                let end = tokens[at..].iter().position(|token| *token == Token::Sign(';'));
                let end = end.map_or(tokens.len(), |len| at + len);
                let mut paths = Vec::new();
                use_tree(&tokens[at + 1..end], &mut 0, &[], &mut paths);
                file.paths.extend(paths.iter().cloned());
                file.imports.extend(paths);
                at = end;
            }
            Token::Word(word) if word == "crate" || word == "super" => {
                let mut path = vec![word.clone()];
                while let [Token::Colons, Token::Word(next), ..] = &tokens[at + 1..] {
                    path.push(next.clone());
                    at += 2;
                }
                file.paths.push(path);
                at += 1;
            }
            _ => at += 1,
        }
    }
    files.push(file);
}

fn file_of(folder: &Path, name: &str) -> PathBuf {
    let flat = folder.join(format!("{name}.rs"));
    if flat.exists() { flat } else { folder.join(name).join("mod.rs") }
}

/// All paths of a `use`, groups taken apart.
fn use_tree(tokens: &[Token], at: &mut usize, prefix: &[String], out: &mut Vec<Vec<String>>) {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(*at) {
        match token {
            Token::Word(word) if word == "as" => *at += 1,
            Token::Word(word) => path.push(word.clone()),
            Token::Sign('{') => {
                *at += 1;
                while tokens.get(*at).is_some_and(|token| *token != Token::Sign('}')) {
                    use_tree(tokens, at, &path, out);
                    if tokens.get(*at) == Some(&Token::Sign(',')) {
                        *at += 1;
                    }
                }
                *at += 1;
                return;
            }
            Token::Sign(',' | '}') => break,
            _ => {}
        }
        *at += 1;
    }
    if path.len() > prefix.len() {
        out.push(path);
    }
}

fn end_of_attribute(tokens: &[Token], at: usize) -> usize {
    let Some(open) = tokens[at..].iter().position(|token| *token == Token::Sign('[')) else {
        return at + 1;
    };
    if open > 2 {
        return at + 1;
    }
    end_of_group(tokens, at + open)
}

/// The first token past the group that opens at `at`.
fn end_of_group(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match token {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// Whether an attribute is `cfg(test)`, or has `test` in an `all`: what it stands before is not
/// there outside of tests.
fn is_for_tests(attribute: &[Token]) -> bool {
    let words: Vec<&str> = attribute
        .iter()
        .filter_map(|token| match token {
            Token::Word(word) => Some(word.as_str()),
            _ => None,
        })
        .collect();
    words.first() == Some(&"cfg")
        && words.contains(&"test")
        && !words.contains(&"not")
        && !words.contains(&"any")
}

/// The first token past the item, field, arm or statement that begins at `at`.
fn end_of_item(tokens: &[Token], at: usize) -> usize {
    let mut index = at;
    // Further attributes belong to it.
    while tokens.get(index) == Some(&Token::Sign('#')) {
        index = end_of_attribute(tokens, index);
    }
    let is_use = tokens
        .get(index..index + 5)
        .is_some_and(|first| first.iter().any(|token| *token == Token::Word("use".to_owned())));
    while let Some(token) = tokens.get(index) {
        match token {
            Token::Sign(';') => return index + 1,
            Token::Sign('}' | ')' | ']') => return index,
            Token::Sign('{') if !is_use => return end_of_group(tokens, index),
            Token::Sign('(' | '[' | '{') => index = end_of_group(tokens, index),
            _ => index += 1,
        }
    }
    index
}

/// Words and signs of a source file, without comments.
fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let mut out = Vec::new();
    let mut at = 0;
    while let Some(&sign) = chars.get(at) {
        let next = chars.get(at + 1).copied();
        match sign {
            '/' if next == Some('/') => {
                at += chars[at..].iter().position(|c| *c == '\n').unwrap_or(chars.len() - at);
            }
            '/' if next == Some('*') => at = end_of_comment(&chars, at),
            '"' => at = string(&chars, at, &mut out),
            '\'' => at = end_of_quote(&chars, at),
            ':' if next == Some(':') => {
                out.push(Token::Colons);
                at += 2;
            }
            _ if sign.is_alphanumeric() || sign == '_' => {
                let len =
                    chars[at..].iter().take_while(|c| c.is_alphanumeric() || **c == '_').count();
                let word: String = chars[at..at + len].iter().collect();
                at += len;
                let is_raw = ["r", "br", "cr"].contains(&word.as_str())
                    && matches!(chars.get(at), Some('"' | '#'));
                match raw_string(&chars, at).filter(|_| is_raw) {
                    Some(end) => at = end,
                    None => out.push(Token::Word(word)),
                }
            }
            _ => {
                if !sign.is_whitespace() {
                    out.push(Token::Sign(sign));
                }
                at += 1;
            }
        }
    }
    out
}

fn end_of_comment(chars: &[char], at: usize) -> usize {
    let mut depth = 0;
    let mut index = at;
    while index < chars.len() {
        match (chars[index], chars.get(index + 1)) {
            ('/', Some('*')) => (depth, index) = (depth + 1, index + 2),
            ('*', Some('/')) => (depth, index) = (depth - 1, index + 2),
            _ => index += 1,
        }
        if depth == 0 {
            break;
        }
    }
    index
}

fn string(chars: &[char], at: usize, out: &mut Vec<Token>) -> usize {
    let mut content = String::new();
    let mut index = at + 1;
    while let Some(&sign) = chars.get(index) {
        match sign {
            '"' => break,
            '\\' => index += 2,
            _ => {
                content.push(sign);
                index += 1;
            }
        }
    }
    out.push(Token::Text(content));
    index + 1
}

/// The end of a raw string whose hashes or quote begin at `at`.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at..].iter().take_while(|c| **c == '#').count();
    if chars.get(at + hashes) != Some(&'"') {
        return None;
    }
    let mut index = at + hashes + 1;
    while index < chars.len() {
        let closes = chars[index] == '"'
            && chars[index + 1..].iter().take_while(|c| **c == '#').count() >= hashes;
        if closes {
            return Some(index + 1 + hashes);
        }
        index += 1;
    }
    Some(index)
}

/// The end of a character, or of the quote of a lifetime.
fn end_of_quote(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => {
            let rest = chars.get(at + 3..).unwrap_or_default();
            rest.iter().position(|c| *c == '\'').map_or(chars.len(), |len| at + 4 + len)
        }
        (_, Some('\'')) => at + 3,
        _ => at + 1,
    }
}

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the crates").to_path_buf()
}

#[test]
fn modules_of_a_crate_use_one_another_in_one_direction() {
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(crates()).expect("the folder of the crates").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let found = circles(&entry.path().join("src"));
        if NOT_YET.contains(&name.as_str()) {
            let clean = format!("{name} has no circle any more: take it out of NOT_YET");
            wrong.extend(Some(clean).filter(|_| found.is_empty()));
        } else {
            wrong.extend(found.iter().map(|circle| format!("{name}: {circle}")));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A crate with these files.
fn made_up(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for (name, content) in files {
        let path = directory.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, content).expect("written");
    }
    directory
}

#[test]
fn a_circle_is_found_in_each_way_to_write_a_path() {
    let ways = [
        "use crate::high::Thing;",
        "use crate::{low, high::{self, Thing}};",
        "use super::super::high::Thing;",
        "fn f() -> crate::high::Thing { todo!() }",
        "mod inner { fn f() { super::super::super::high::f(); } }",
        "use crate::Thing;",
        "macro_rules! m { () => { $crate::high::f() }; }",
        "const QUOTE: char = '\"'; use crate::high::Thing;",
        "#[cfg(not(test))] use crate::high::Thing;",
    ];
    for way in ways {
        let made = made_up(&[
            ("lib.rs", "mod high;\nmod low;\npub use high::Thing;\n"),
            ("high.rs", "use crate::low::deep;\npub struct Thing;\n"),
            ("low/mod.rs", "pub(crate) mod deep;\n"),
            ("low/deep.rs", way),
        ]);
        let found = circles(made.path());
        assert_eq!(found.len(), 1, "{way}: {found:?}");
        assert!(found[0].contains("low uses high (low/deep.rs)"), "{way}: {found:?}");
    }
}

#[test]
fn tests_comments_and_strings_make_no_circle() {
    let made = made_up(&[
        ("lib.rs", "mod high;\nmod low;\n#[cfg(test)]\nmod tests;\n"),
        ("high.rs", "use crate::low;\n"),
        (
            "low.rs",
            "//! [`crate::high`]\n/* crate::high */\nconst A: &str = \"crate::high\";\n\
             const B: &str = r#\"crate::high \"#;\nuse super::low::deep;\n\
             #[cfg(test)]\nuse crate::high::{Thing, Other};\n\
             struct S<'a> { #[cfg(test)] x: Vec<u8>, y: &'a u8 }\n\
             #[cfg(test)]\n#[allow(dead_code)]\npub(crate) fn f() { crate::high::f(); }\n\
             #[cfg(test)]\nmod tests { use crate::high::Thing; }\n",
        ),
        ("tests.rs", "use crate::high;\nuse crate::low;\n"),
    ]);
    assert_eq!(circles(made.path()), Vec::<String>::new());
    assert_eq!(uses(made.path())["high"].keys().collect::<Vec<_>>(), ["low"]);
}

#[test]
fn a_circle_inside_a_folder_is_found() {
    let ways = [
        "use super::high::Thing;",
        "use super::Thing;",
        "use crate::folder::Thing;",
        "use crate::Thing;",
        "fn f() { super::super::folder::high::f(); }",
    ];
    for way in ways {
        let made = made_up(&[
            ("lib.rs", "mod folder;\npub use folder::Thing;\n"),
            ("folder/mod.rs", "mod high;\nmod low;\npub use high::Thing;\n"),
            ("folder/high.rs", "use super::low::deep;\npub struct Thing;\n"),
            ("folder/low.rs", way),
        ]);
        let found = circles(made.path());
        assert_eq!(found.len(), 1, "{way}: {found:?}");
        assert!(found[0].contains("low uses high (folder/low.rs)"), "{way}: {found:?}");
    }
}

#[test]
fn what_a_folder_itself_has_makes_no_circle_with_what_is_inside() {
    let made = made_up(&[
        ("lib.rs", "mod folder;\n"),
        ("folder/mod.rs", "mod one;\nmod two;\npub struct Own(one::Part);\n"),
        ("folder/one.rs", "use super::Own;\nuse super::two::Part as Other;\npub struct Part;\n"),
        ("folder/two.rs", "use crate::folder::Own;\npub struct Part;\n"),
    ]);
    assert_eq!(circles(made.path()), Vec::<String>::new());
}
